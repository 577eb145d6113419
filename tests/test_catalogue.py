import csv
import io
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arcface_keras.data.catalogue import CatalogueError, encode_labels, read_catalogue
from arcface_keras.data.tables import read_table
from arcface_keras.data.titles import decode_title

HEADER = ["posting_id", "image", "image_phash", "title", "label_group"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    (folder / "images").mkdir()
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (folder / "images" / name).write_bytes(b"any content")
    return folder


def csv_text(rows, header=HEADER, **dialect):
    buffer = io.StringIO(newline="")
    csv.writer(buffer, **dialect).writerows([header, *rows])
    return buffer.getvalue()


def read(folder, content, **options):
    path = folder / "train.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return read_catalogue(path, folder / "images", **options)


def problems(folder, content, **options):
    with pytest.raises(CatalogueError, match=r"train\.csv") as caught:
        read(folder, content, **options)
    return [text.removeprefix(f"{folder / 'train.csv'}, ") for text in caught.value.problems]


ids = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=12)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
groups = texts.filter(lambda text: text.strip() != "")


@st.composite
def tables(draw):
    count = draw(st.integers(1, 6))
    names = draw(
        st.lists(ids.filter(lambda i: i.split() == [i]), min_size=count, max_size=count, unique=True)
    )
    hashes = [draw(st.text("0123456789abcdef", min_size=16, max_size=16) | st.just("")) for _ in names]
    return [
        [name, draw(st.sampled_from(["a.jpg", "b.jpg"])), phash, draw(texts), draw(groups)]
        for name, phash in zip(names, hashes, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(
    rows=tables(),
    bom=st.booleans(),
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
@example([["t", "a.jpg", "", '"', '",\n"']], False, "\n", csv.QUOTE_MINIMAL)
@example(
    [["t", "a.jpg", "", "ends in \\", "g"], ["u", "a.jpg", "", 'a "b"', "g"]], True, "\r\n", csv.QUOTE_ALL
)
def test_catalogue_returns_every_text_that_a_csv_writer_wrote(folder, rows, bom, ending, quoting):
    # csv.writer leaves a lone carriage return bare when it is no part of the line ending
    bare = any("\r" in value for row in rows for value in row)
    text = csv_text(rows, lineterminator=ending, quoting=csv.QUOTE_ALL if bare else quoting)
    catalogue = read(folder, text.encode("utf-8-sig" if bom else "utf-8"), labelled=True)
    names, images, hashes, titles, label_groups = zip(*rows, strict=True)
    assert list(catalogue.posting_ids) == list(names)
    assert list(catalogue.images) == list(images)
    assert list(catalogue.phashes) == list(hashes)
    assert list(catalogue.titles) == [decode_title(title) for title in titles]
    assert list(catalogue.label_groups) == list(label_groups)
    assert list(catalogue.paths) == [(folder / "images" / image).resolve() for image in images]


@pytest.mark.parametrize(
    "phash", ["0012345678901234", "12345678e9012345", "0000000000000000", "1234567890123456"]
)
@pytest.mark.parametrize(
    "title", ["NA", "null", "NaN", "None", "", "#N/A", "1e5", "007", "True", "inf", " padded "]
)
def test_catalogue_keeps_values_that_look_like_something_else(folder, phash, title):
    catalogue = read(folder, csv_text([["1", "a.jpg", phash, title, "0249114794"]]))
    assert catalogue.posting_ids[0] == "1"
    assert catalogue.phashes[0] == phash
    assert catalogue.titles[0] == title
    assert catalogue.label_groups[0] == "0249114794"


def test_catalogue_ignores_further_columns_and_the_order_of_columns(folder):
    header = ["", "title", "image_phash", "price", "image", "posting_id"]
    catalogue = read(folder, csv_text([["0", "Soap", "ff", "9", "b.jpg", "x"]], header))
    assert (catalogue.titles[0], catalogue.images[0], catalogue.posting_ids[0]) == ("Soap", "b.jpg", "x")
    assert catalogue.label_groups is None


def test_catalogue_lower_cases_hashes_so_that_equal_ones_are_equal(folder):
    catalogue = read(folder, csv_text([["1", "a.jpg", "ABcd", "", "g"], ["2", "a.jpg", "abCD", "", "g"]]))
    assert list(catalogue.phashes) == ["abcd", "abcd"]


def test_catalogue_labelled_false_ignores_the_groups(folder):
    text = csv_text([["1", "a.jpg", "", "", ""]])
    assert read(folder, text, labelled=False).label_groups is None


def test_catalogue_of_a_header_alone_is_empty_for_test_and_an_error_for_train(folder):
    assert len(read(folder, csv_text([], HEADER[:4]))) == 0
    assert read(folder, csv_text([], HEADER[:4])).paths.shape == (0,)
    assert "at least one listing" in problems(folder, csv_text([]), labelled=True)[0]


def test_catalogue_take_keeps_all_columns_together(folder):
    rows = [[f"t{i}", f"{'abc'[i]}.jpg", f"f{i}", f"title {i}", f"g{i}"] for i in range(3)]
    catalogue = read(folder, csv_text(rows))
    for chosen in ([2, 0], np.array([True, False, True]), np.array([], dtype=int), []):
        part = catalogue.take(chosen)
        wanted = [rows[i] for i in np.arange(3)[np.asarray(chosen, dtype=getattr(chosen, "dtype", int))]]
        columns = (part.posting_ids, part.images, part.phashes, part.titles, part.label_groups)
        assert [list(row) for row in zip(*columns, strict=True)] == wanted
        assert [path.name for path in part.paths] == [row[1] for row in wanted]
        assert len(part) == len(wanted)
    with pytest.raises(ValueError, match="rows must be integer positions"):
        catalogue.take([0.5])


def test_catalogue_arrays_cannot_be_changed(folder):
    catalogue = read(folder, csv_text([["1", "a.jpg", "", "", "g"]]))
    with pytest.raises(ValueError, match="read-only"):
        catalogue.titles[0] = "other"


def test_catalogue_names_row_and_column_of_every_problem_at_once(folder):
    rows = [
        ["t1", "a.jpg", "00ff", "fine", "g"],
        ["", "a.jpg", "00ff", "two\nlines", "g"],
        ["t1", "absent.jpg", "4.4E+15", "", " "],
        ["two words", "", "0ff", "", "g"],
    ]
    found = problems(folder, csv_text(rows))
    assert [text.split(":")[0] for text in found] == [
        "row 3, column posting_id",
        "row 4, column posting_id",
        "row 4, column label_group",
        "row 4, column image_phash",
        "row 4, column image",
        "row 5, column posting_id",
        "row 5, column image_phash",
        "row 5, column image",
    ]
    assert "also in row 2" in found[1]
    assert "'absent.jpg' does not exist" in found[4]


def test_catalogue_error_shows_twenty_problems_and_the_count(folder):
    rows = [[f"t{i}", f"none{i}.jpg", "", "", "g"] for i in range(37)]
    with pytest.raises(CatalogueError, match=r"^37 problems\. The first 20:\n") as caught:
        read(folder, csv_text(rows))
    assert len(caught.value.problems) == 37
    assert len(str(caught.value).splitlines()) == 21


@pytest.mark.parametrize("column", HEADER)
def test_catalogue_names_a_missing_and_a_repeated_column(folder, column):
    kept = [name for name in HEADER if name != column]
    row = {"posting_id": "t", "image": "a.jpg", "image_phash": "", "title": "", "label_group": "g"}
    without = csv_text([[row[name] for name in kept]], kept)
    if column in ("image_phash", "title"):
        catalogue = read(folder, without, labelled=True)
        assert (catalogue.phashes.tolist(), catalogue.titles.tolist()) == ([""], [""])
    else:
        found = problems(folder, without, labelled=True)
        assert found == [f"row 1, column {column}: the column is missing. Received columns: {kept}"]
    found = problems(folder, csv_text([[row[name] for name in [*HEADER, column]]], [*HEADER, column]))
    assert found == [f"row 1, column {column}: the column must be there once. Received: 2 times"]


@pytest.mark.parametrize("values", [["t", "a.jpg"], ["t", "a.jpg", "", "soap", "g", "", ""]])
def test_catalogue_names_rows_with_a_wrong_number_of_fields(folder, values):
    found = problems(folder, csv_text([["s", "a.jpg", "", "", "g"], values, ["u", "no.jpg", "", "", "g"]]))
    assert found[0] == f"row 3: the row must have 5 fields, as the header has. Received: {len(values)}"
    assert found[1].startswith("row 4, column image")


def test_catalogue_counts_blank_lines_as_rows_and_skips_them(folder):
    text = csv_text([["s", "a.jpg", "", "", "g"]]) + "\r\n\r\nt,no.jpg,,,g\r\n"
    assert problems(folder, text)[0].startswith("row 5, column image")
    assert len(read(folder, text, missing_images="keep")) == 2


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "train.csv: the file is empty"),
        (b"\n\n", "train.csv: the file is empty"),
        ("posting_id,image".encode("utf-16"), "train.csv: the file is UTF-16"),
        (b'posting_id,image\n"two\nlines",a\ncaf\xe9,b\n', "row 3: the file must be UTF-8 text; byte 0xe9"),
        (b"posting_id,image\na,b\nc\x00,\x00d\n", "row 3: NUL bytes are not text; the file holds 2"),
        (b'posting_id,image\na,b\nc,"d\n', r"row 3: the quotes of the row cannot be read \(unexpected end"),
        (b'posting_id,image\na,"b" c\n', "row 2: the quotes of the row cannot be read"),
        (
            b"posting_id;image\n",
            "row 1, column image: the column is missing. Received columns: .'posting_id;image'",
        ),
    ],
)
def test_catalogue_names_the_place_where_a_file_cannot_be_read(folder, content, what):
    with pytest.raises(CatalogueError, match=what):
        read(folder, content)


def test_catalogue_names_an_absent_file_and_an_absent_folder(folder, tmp_path):
    with pytest.raises(CatalogueError, match=r"none\.csv: the file cannot be read \(No such file"):
        read_catalogue(tmp_path / "none.csv", folder / "images")
    (tmp_path / "test.csv").write_text("posting_id,image,image_phash,title\n")
    with pytest.raises(CatalogueError, match="nowhere: the image folder does not exist"):
        read_catalogue(tmp_path / "test.csv", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"missing_images must be one of .*missing_images='drop'"):
        read_catalogue(tmp_path / "test.csv", folder, missing_images="drop")


@pytest.mark.parametrize("line", ['"2"" seam, blue"', r'"2\" seam, blue"'])
def test_catalogue_reads_both_ways_to_escape_a_quote(folder, line):
    text = f'posting_id,image,image_phash,title\nt,a.jpg,ff,{line}\nu,b.jpg,ff,"\\xe2\\x9c\\x85, x"\n'
    catalogue = read(folder, text)
    assert list(catalogue.titles) == ['2" seam, blue', "✅, x"]
    assert list(catalogue.posting_ids) == ["t", "u"]


@settings(max_examples=100, deadline=None)
@given(rows=tables())
def test_catalogue_reads_what_a_writer_with_backslash_escapes_wrote(folder, rows):
    rows = [["quoted", "a.jpg", "", 'a "b", c', "g"], *(row for row in rows if row[0] != "quoted")]
    text = csv_text(rows, doublequote=False, escapechar="\\", quoting=csv.QUOTE_ALL)
    catalogue = read(folder, text)
    assert list(catalogue.titles) == [decode_title(row[3]) for row in rows]
    assert list(catalogue.posting_ids) == [row[0] for row in rows]


def test_catalogue_reports_the_plain_reading_when_backslash_escapes_do_not_help(folder):
    text = 'posting_id,image,image_phash,title\nt,a.jpg,ff,"2\\" seam"\nu,b.jpg\n'
    assert problems(folder, text)[0].startswith("row 2: the quotes of the row cannot be read")


@pytest.mark.parametrize(
    "image",
    [
        "../secret.jpg",
        "sub/../../secret.jpg",
        "/etc/hostname",
        "C:\\a.jpg",
        "..",
        "link.jpg",
        "sub/../inside.jpg",
        "out/secret.jpg",
    ],
)
@pytest.mark.parametrize("missing_images", ["error", "keep"])
def test_catalogue_refuses_images_outside_the_folder(tmp_path, image, missing_images):
    (tmp_path / "images").mkdir()
    for place in ("secret.jpg", "images/inside.jpg", "images/C:\\a.jpg"):
        (tmp_path / place).write_bytes(b"x")
    (tmp_path / "images" / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "images" / "out").symlink_to(tmp_path)
    found = problems(tmp_path, csv_text([["t", image, "", "", "g"]]), missing_images=missing_images)
    assert len(found) == 1
    assert found[0].startswith("row 2, column image: an image must ")
    assert repr(image) in found[0]


def test_catalogue_follows_links_inside_the_folder_and_to_the_folder(tmp_path):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "real" / "sub" / "x.jpg").write_bytes(b"x")
    (tmp_path / "real" / "y.jpg").symlink_to("sub/x.jpg")
    (tmp_path / "images").symlink_to("real")
    catalogue = read(tmp_path, csv_text([["1", "y.jpg", "", "", "g"], ["2", "sub/x.jpg", "", "", "g"]]))
    assert list(catalogue.paths) == [(tmp_path / "real" / "sub" / "x.jpg").resolve()] * 2


def test_catalogue_keeps_listings_without_an_image_file_on_request(tmp_path):
    (tmp_path / "images" / "dir").mkdir(parents=True)
    os.mkfifo(tmp_path / "images" / "pipe")
    (tmp_path / "images" / "loop").symlink_to("loop")
    names = ["absent.jpg", "dir", "pipe", "loop", "n" * 300]
    text = csv_text([[str(i), name, "", "", "g"] for i, name in enumerate(names)])
    assert len(problems(tmp_path, text)) == len(names)
    catalogue = read(tmp_path, text, missing_images="keep")
    assert [path.name for path in catalogue.paths] == names


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200) | texts.map(lambda text: ("posting_id,image\n" + text).encode()))
def test_table_reading_never_fails_in_its_own_way(folder, content):
    path = folder / "fuzz.csv"
    path.write_bytes(content)
    table = read_table(path)
    assert table.problems or table.header
    assert all(len(values) == len(table.header) for _, values in table.rows)


@given(st.lists(st.sampled_from(["b", "a", "10", "9", "", "ä"]), max_size=20), st.randoms())
def test_encode_labels_numbers_sorted_groups_whatever_the_order(groups, random):
    labels, classes = encode_labels(groups)
    assert labels.dtype == np.int64
    assert classes == sorted(set(groups))
    assert [classes[label] for label in labels] == groups
    shuffled = random.sample(groups, len(groups))
    assert encode_labels(np.array(shuffled, dtype=object))[1] == classes


def test_encode_labels_refuses_what_is_no_text():
    with pytest.raises(ValueError, match="the catalogue has none"):
        encode_labels(None)
    with pytest.raises(ValueError, match=r"must hold text\. Received: 3 of type int"):
        encode_labels(["a", 3])


@pytest.mark.parametrize(
    ("raw", "title"),
    [
        (r"\xe2\x9c\x85 Ready", "✅ Ready"),
        (r"caf\xc3\xa9 caf\xC3\xA9", "café café"),
        (r"b'\xe2\x9d\xa4 it\'s \\ 1\n2 \"'", "❤ it's \\ 1\n2 \""),
        (r'b"it' + "'" + r's \xe2\x9d\xa4"', "it's ❤"),
        (r"b'one' and b'two'", r"b'one' and b'two'"),
        (r"b'broken\'", r"b'broken\'"),
        (r"\xe2\x9c", r"\xe2\x9c"),
        (r"\xFF\xe2\x9c\x85\xfe", r"\xFF✅\xfe"),
        (r"\xe2\x9c x \x85", r"\xe2\x9c x \x85"),
        (r"\xzz \x4 \u2705 \n C:\new", r"\xzz \x4 \u2705 \n C:\new"),
        (r"\\xe2\x9c\x85", r"\\xe2\x9c\x85"),
        (r"日本 \xe2\x9c\x85 é", "日本 ✅ é"),
        ("", ""),
        ("\\", "\\"),
    ],
)
def test_decode_title_turns_byte_escapes_into_text(raw, title):
    assert decode_title(raw) == title


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_title_undoes_the_repr_of_bytes(text):
    assert decode_title(repr(text.encode())) == text
    inner = "".join(f"\\x{byte:02X}" for byte in text.encode())
    assert decode_title(inner) == text


@given(st.text(st.sampled_from("\\xe29c85bF'\"n é\0\ud800")))
def test_decode_title_never_raises_and_leaves_text_without_escapes(text):
    title = decode_title(text)
    if "\\x" not in text and not text.startswith("b"):
        assert title == text


def test_catalogue_module_loads_no_tensorflow():
    heavy = "('tensorflow', 'keras', 'pandas', 'sklearn')"
    code = f"import sys, arcface_keras.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_catalogue_without_an_image_folder_needs_no_images(folder):
    path = folder / "titles.csv"
    path.write_text("posting_id,title,label_group\na,red shoe,1\nb,mug,2\n")
    catalogue = read_catalogue(path, None, labelled=True)
    assert catalogue.titles.tolist() == ["red shoe", "mug"]
    assert catalogue.images.tolist() == ["", ""]
    assert catalogue.paths.tolist() == [None, None]
    assert catalogue.take([1]).posting_ids.tolist() == ["b"]
    with pytest.raises(CatalogueError, match=r"image: the column is missing"):
        read_catalogue(path, folder / "images")


def test_catalogue_without_an_image_folder_keeps_names_and_checks_the_rest(folder):
    path = folder / "titles.csv"
    path.write_text("posting_id,image,title\na,absent.jpg,red shoe\na,../out.jpg,mug\n")
    with pytest.raises(CatalogueError, match=r"ids must be unique") as caught:
        read_catalogue(path, None)
    assert len(caught.value.problems) == 1
    path.write_text("posting_id,image,title\na,absent.jpg,red shoe\n")
    assert read_catalogue(path, None).images.tolist() == ["absent.jpg"]
