import io
import os
import struct
import sys
import threading
import time
import warnings
import zlib
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from arcface_keras._progress import progress_bar
from arcface_keras.data import images as images_module
from arcface_keras.data.decoding import open_photo
from arcface_keras.data.images import ImageError, image_dataset, load_image, scan_images

SIZE = 16


def photo(width=48, height=32, seed=0):
    """A smooth colour picture without symmetry: low-pass noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def load(tmp_path, data, size=SIZE, name="photo.jpg", **options):
    path = tmp_path / name
    path.write_bytes(data)
    return load_image(path, size, **options)


def expected(image, size=SIZE):
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC))


def difference(a, b):
    return np.abs(a.astype(int) - b.astype(int))


def on_white(image):
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    return Image.fromarray(np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8))


def with_alpha(image):
    ramp = np.linspace(0, 255, image.width * image.height).reshape(image.height, image.width)
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(ramp.astype(np.uint8)))
    return image


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo", "photo.gif"])
def test_lossless_formats_give_the_resized_pixels_whatever_the_name(tmp_path, form, options, mode, name):
    image = photo().convert(mode)
    pixels = load(tmp_path, encoded(image, form, **options), name=name)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (SIZE, SIZE, 3)
    np.testing.assert_array_equal(pixels, expected(image))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"optimize": True}], ids=str
)
@pytest.mark.parametrize("mode", ["RGB", "L", "YCbCr"])
def test_jpeg_variants_give_the_photo(tmp_path, options, mode):
    image = photo().convert(mode)
    pixels = load(tmp_path, encoded(image, "JPEG", quality=95, **options))
    assert difference(pixels, expected(image)).max() <= 14
    assert difference(pixels, expected(image)).mean() <= 3


def adobe_jpeg(image, transform):
    """A CMYK JPEG; Pillow stores it inverted as Adobe does, the marker's transform flag says CMYK or YCCK."""
    data = encoded(image, "JPEG", quality=95)
    at = data.index(b"Adobe")
    assert data[at + 11] == 0
    return data[: at + 11] + bytes([transform]) + data[at + 12 :]


def test_cmyk_jpeg_is_not_inverted(tmp_path):
    white_to_cyan = Image.new("CMYK", (32, 32), (0, 0, 0, 0))
    white_to_cyan.paste((255, 0, 0, 0), (0, 16, 32, 32))
    pixels = load(tmp_path, adobe_jpeg(white_to_cyan, 0))
    assert difference(pixels[:6], np.array([255, 255, 255])).max() <= 6
    assert difference(pixels[-6:], np.array([0, 255, 255])).max() <= 6
    pixels = load(tmp_path, encoded(photo().convert("CMYK"), "JPEG", quality=95))
    assert difference(pixels, expected(photo())).mean() <= 3


def test_ycck_jpeg_is_converted(tmp_path):
    # Pillow stores 255 - value: Y 64, neutral Cb and Cr, K 255 (no black).
    # Adobe inverts before the change to YCC, so Y is the ink: 64 of 255.
    image = Image.new("CMYK", (32, 32), (191, 127, 127, 0))
    pixels = load(tmp_path, adobe_jpeg(image, 2))
    assert difference(pixels, np.full(3, 255 - 64)).max() <= 4


def test_palette_grey_and_bilevel_images_are_expanded_before_resizing(tmp_path):
    palette = photo().quantize(16)
    np.testing.assert_array_equal(load(tmp_path, encoded(palette, "PNG")), expected(palette))
    bilevel = photo().convert("1")
    np.testing.assert_array_equal(load(tmp_path, encoded(bilevel, "PNG")), expected(bilevel))
    assert len(np.unique(load(tmp_path, encoded(bilevel, "PNG")))) > 2


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("TIFF", "RGBA"), ("TIFF", "LA"), ("WEBP", "RGBA")]
)
def test_alpha_is_flattened_on_white(tmp_path, form, mode):
    image = with_alpha(photo()).convert(mode)
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    pixels = load(tmp_path, encoded(image, form, **options))
    assert difference(pixels, expected(on_white(image))).max() <= 1
    assert difference(pixels, expected(image)).max() > 20


@pytest.mark.parametrize(
    ("form", "transparency"),
    [("PNG", 0), ("PNG", bytes([0, 128, 255, 64])), ("GIF", 0)],
    ids=["png-index", "png-bytes", "gif-index"],
)
def test_palette_transparency_is_flattened_on_white(tmp_path, form, transparency):
    image = photo().quantize(4)
    data = encoded(image, form, transparency=transparency)
    reopened = Image.open(io.BytesIO(data))
    pixels = load(tmp_path, data)
    assert difference(pixels, expected(on_white(reopened))).max() <= 1
    assert difference(pixels, expected(image)).max() > 20


@pytest.mark.parametrize(("mode", "key"), [("RGB", (255, 0, 0)), ("L", 10), ("1", 0)])
def test_colour_key_transparency_of_png_is_flattened_on_white(tmp_path, mode, key):
    image = Image.new(mode, (8, 8), key)
    data = encoded(image, "PNG", transparency=key)
    np.testing.assert_array_equal(load(tmp_path, data), np.full((SIZE, SIZE, 3), 255))


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    values = np.arange(0, 65536, 16).astype(np.uint16).reshape(64, 64)
    pixels = load(tmp_path, encoded(Image.fromarray(values), "PNG"), size=64)
    np.testing.assert_array_equal(pixels[..., 0], np.rint(values / 257))
    dark = np.full((8, 8), 200, np.uint16)
    assert load(tmp_path, encoded(Image.fromarray(dark), "PNG")).max() == 1
    big_endian = encoded(Image.frombytes("I;16B", (64, 64), values.astype(">u2").tobytes()), "TIFF")
    np.testing.assert_array_equal(load(tmp_path, big_endian, size=64)[..., 0], np.rint(values / 257))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.float32([[0.0, 0.5, 1.0]]), [0, 128, 255]),
        (np.float32([[-3.0, 2.0, 255.0]]), [0, 2, 255]),
        (np.float32([[np.nan, 32768.0, 65535.0]]), [0, 128, 255]),
        (np.int32([[0, 7, 200]]), [0, 7, 200]),
        (np.int32([[-5, 257, 65535]]), [0, 1, 255]),
        (np.int32([[0, 2**30, 2**31 - 1]]), [0, 64, 127]),
        (np.float32([[0.0, 0.0, 0.0]]), [0, 0, 0]),
        (np.float32([[0.0, 1e20, 2e20]]), [0, 128, 255]),
    ],
)
def test_integer_and_float_grey_take_the_smallest_full_scale(tmp_path, values, wanted):
    data = encoded(Image.fromarray(np.repeat(values, 3, axis=0)), "TIFF")
    np.testing.assert_array_equal(load(tmp_path, data, size=3)[1, :, 0], wanted)


def test_lab_tiff_is_converted(tmp_path):
    lab = Image.merge("LAB", [Image.new("L", (8, 8), level) for level in (138, 209, 198)])
    pixels = load(tmp_path, encoded(lab, "TIFF"))
    # L 54.3, a 80.8, b 69.9 (D50) is sRGB red
    assert difference(pixels, np.array([255, 0, 0])).max() <= 6


def bmp32(image, masks=None):
    """A 32-bit BMP, bottom-up; `masks` writes the BITFIELDS variant with an alpha mask."""
    bgra = np.asarray(image.convert("RGBA"))[::-1, :, [2, 1, 0, 3]].tobytes()
    header = struct.pack(
        "<IiiHHIIiiII", 108 if masks else 40, *image.size, 1, 32, 3 if masks else 0, 0, 0, 0, 0, 0
    )
    if masks:
        header += struct.pack("<4I", *masks) + b"\0" * 52
    offset = 14 + len(header)
    return b"BM" + struct.pack("<IHHI", offset + len(bgra), 0, 0, offset) + header + bgra


def test_bmp_of_32_bits_has_three_channels(tmp_path):
    image = with_alpha(photo())
    np.testing.assert_array_equal(load(tmp_path, bmp32(image)), expected(photo()))
    masked = load(tmp_path, bmp32(image, (0xFF0000, 0xFF00, 0xFF, 0xFF000000)))
    assert difference(masked, expected(on_white(image))).max() <= 1


@pytest.mark.parametrize(
    ("form", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})], ids=str
)
def test_animations_give_their_first_frame(tmp_path, form, options):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(
        load(tmp_path, data), np.broadcast_to(np.uint8([255, 0, 0]), (SIZE, SIZE, 3))
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(form, {})
    data = encoded(photo(), form, exif=exif, **options)
    if form == "TIFF":
        wanted = Image.open(io.BytesIO(data))
        wanted.load()
    else:
        wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert wanted.size == ((32, 48) if orientation >= 5 else (48, 32))
    pixels = load(tmp_path, data)
    np.testing.assert_array_equal(pixels, expected(wanted))
    if orientation > 1:
        assert difference(pixels, expected(photo())).max() > 20


def test_exif_jpeg_and_rotated_png_give_the_same_pixels(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo(), "JPEG", exif=exif, quality=95)
    rotated = Image.open(io.BytesIO(data)).convert("RGB").transpose(Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(load(tmp_path, data), load(tmp_path, encoded(rotated, "PNG")))


def test_a_photo_is_not_blamed_where_pillow_is_missing(tmp_path, monkeypatch):
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(photo(), "JPEG"))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="needs Pillow: pip install"):
        load_image(path, SIZE)
    with pytest.raises(ImportError, match="needs Pillow: pip install"):
        scan_images([path], SIZE)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_broken_exif_does_not_lose_the_photo(tmp_path):
    data = encoded(photo(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage")
    np.testing.assert_array_equal(load(tmp_path, data), load(tmp_path, encoded(photo(), "JPEG")))


@pytest.mark.parametrize("size", [8, 16, 20, 31, 48])
def test_big_jpegs_are_decoded_smaller_with_nearly_the_same_pixels(tmp_path, size):
    image = photo(600, 480)
    data = encoded(image, "JPEG", quality=95)
    full = expected(Image.open(io.BytesIO(data)), size)
    assert difference(load(tmp_path, data, size), full).max() <= 5


def test_resizing_is_antialiased_and_keeps_no_aspect(tmp_path):
    stripes = np.zeros((64, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    pixels = load(tmp_path, encoded(Image.fromarray(stripes), "PNG"), size=8)
    assert difference(pixels, np.full(3, 127.5)).max() <= 4
    halves = Image.new("RGB", (100, 10), "white")
    halves.paste("black", (50, 0, 100, 10))
    pixels = load(tmp_path, encoded(halves, "PNG"), size=10)
    assert pixels[:, :4].min() > 240
    assert pixels[:, 6:].max() < 15


FORMATS = {
    "jpeg": ("JPEG", {"quality": 90}),
    "progressive": ("JPEG", {"quality": 90, "progressive": True}),
    "png": ("PNG", {}),
    "gif": ("GIF", {}),
    "webp": ("WEBP", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "tiff-lzw": ("TIFF", {"compression": "tiff_lzw"}),
}


def pixels_or_none(path, **options):
    """The pixels, or None after an ImageError that names the file; any other error is a failure."""
    try:
        return load_image(path, SIZE, **options)
    except ImageError as error:
        named = str(error) == f"{path}: {error.reason}" and error.reason
    assert named
    return None


@pytest.mark.filterwarnings("ignore:Truncated File Read:UserWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_truncated_files_are_named_or_whole(tmp_path, name):
    form, options = FORMATS[name]
    data = encoded(photo(96, 64), form, **options)
    whole = load(tmp_path, data)
    refused = 0
    for cut in sorted({*np.linspace(0, len(data) - 1, 60).astype(int), *range(len(data) - 24, len(data))}):
        path = tmp_path / f"cut{cut}.jpg"
        path.write_bytes(data[:cut])
        pixels = pixels_or_none(path)
        if pixels is None:
            refused += 1
        else:
            # only trailing bytes that carry no pixels may be missing
            np.testing.assert_array_equal(pixels, whole)
            assert len(data) - cut <= 24
    assert refused >= 59


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_give_pixels_or_an_image_error(tmp_path_factory, data):
    form, options = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]
    content = bytearray(encoded(photo(), form, **options))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels = pixels_or_none(path, max_pixels=10_000_000)
    assert pixels is None or pixels.shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html>not found</html>", "it is no JPEG, PNG, GIF, WebP, BMP or TIFF image"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "it is no JPEG, PNG, GIF, WebP, BMP or TIFF image"),
        (b"\x00" * 5000, "it is no JPEG"),
        (b"\xff\xd8\xff", "the image is broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is no JPEG"),
    ],
)
def test_files_that_are_no_image_are_named_with_the_reason(tmp_path, content, reason):
    with pytest.raises(ImageError, match=reason) as caught:
        load(tmp_path, content)
    assert caught.value.path == str(tmp_path / "photo.jpg")
    assert str(caught.value) == f"{tmp_path / 'photo.jpg'}: {caught.value.reason}"


def test_absent_files_folders_and_pipes_are_named(tmp_path):
    with pytest.raises(ImageError, match=r"none\.jpg: the image cannot be read \(No such file"):
        load_image(tmp_path / "none.jpg", SIZE)
    with pytest.raises(ImageError, match="it is no file"):
        load_image(tmp_path, SIZE)
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match=r"pipe\.jpg: it is no file"):
        load_image(tmp_path / "pipe.jpg", SIZE)


def png_header(width, height):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    body = struct.pack(">I", len(head)) + chunk + struct.pack(">I", PngImagePlugin._crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + body + b"\0\0\0\0IDAT"


def webp_header(kind, width, height):
    size24 = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    payload = {
        b"VP8X": b"\0\0\0\0" + size24,
        b"VP8L": b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + b"\0" * 5,
        b"VP8 ": b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height),
    }[kind]
    return b"RIFF" + struct.pack("<I", 22) + b"WEBP" + kind + struct.pack("<I", len(payload)) + payload


@pytest.mark.parametrize(
    "data",
    [
        png_header(60_000, 60_000),
        png_header(20_001, 5_000),
        encoded(Image.new("1", (20_001, 5_000)), "PNG"),
        *(webp_header(kind, 16_383, 16_383) for kind in (b"VP8X", b"VP8L", b"VP8 ")),
    ],
    ids=["png-3600M", "png-100M", "real-png-100M", "webp-x", "webp-l", "webp"],
)
def test_absurdly_large_images_are_refused_by_their_header(tmp_path, data):
    with pytest.raises(ImageError, match=r"\d+ x \d+ pixels are more than max_pixels=100000000"):
        load(tmp_path, data)


def test_webp_sizes_in_headers_are_those_of_real_files(tmp_path):
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}):
        data = encoded(photo(48, 32), "WEBP", **options)
        with pytest.raises(ImageError, match="48 x 32 pixels are more than max_pixels=1535"):
            load(tmp_path, data, max_pixels=1535)
        assert load(tmp_path, data, max_pixels=1536).shape == (SIZE, SIZE, 3)


def test_large_images_within_the_limit_give_no_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    data = encoded(photo(), "PNG")
    with pytest.warns(Image.DecompressionBombWarning, match="exceeds limit"):
        Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(load(tmp_path, data), expected(photo()))


@pytest.mark.parametrize("size", [0, -1, 2.0, "16", True, None])
def test_sizes_that_are_no_positive_integer_are_refused(tmp_path, size):
    with pytest.raises(ValueError, match=r"image_size must be a positive integer\. Received: image_size="):
        load_image(tmp_path / "none.jpg", size)
    with pytest.raises(ValueError, match="image_size must be"):
        scan_images([], size)
    with pytest.raises(ValueError, match="batch_size must be"):
        image_dataset([], SIZE, size)
    with pytest.raises(ValueError, match="max_pixels must be"):
        load_image(tmp_path / "none.jpg", SIZE, max_pixels=size)


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Sixty solid photos: photo i is the colour (i, 4 i, 255 - i), some large, so slow to decode."""
    folder = tmp_path_factory.mktemp("colours")
    for i in range(60):
        side = 900 if i % 7 == 0 else 8
        Image.new("RGB", (side, side), (i, 4 * i, 255 - i)).save(folder / f"{i:02}.png")
    return [folder / f"{i:02}.png" for i in range(60)]


def check_scan(scan, folder):
    """Thirty good photos, a half one, an empty one, an absent one, and rows that share the bad files."""
    good = [folder / f"good{i}.jpg" for i in range(30)]
    for i, path in enumerate(good):
        path.write_bytes(encoded(photo(200, 150, seed=i), "JPEG"))
    data = good[0].read_bytes()
    (folder / "half.jpg").write_bytes(data[: len(data) * 2 // 3])
    (folder / "empty.jpg").write_bytes(b"")
    bad = [folder / name for name in ("half.jpg", "empty.jpg", "absent.jpg")]
    paths = [bad[1], *good[:15], bad[0], *good[15:], bad[2], bad[0], good[0], bad[0]]
    found = scan(paths, SIZE)
    assert list(found) == [0, 16, 32, 33, 35]
    assert found[0] == "the file is empty"
    assert "truncated" in found[16]
    assert "No such file" in found[32]
    assert found[16] == found[33] == found[35]


@pytest.mark.parametrize("workers", [None, 1, 16])
def test_scan_names_every_row_with_a_bad_file(tmp_path, workers):
    check_scan(lambda paths, size: scan_images(paths, size, workers=workers), tmp_path)


def header_only_scan(paths, size):
    found = {}
    for row, path in enumerate(paths):
        try:
            with Image.open(path):
                pass
        except Exception as error:
            found[row] = str(error)
    return found


@pytest.mark.parametrize(
    "broken", [lambda paths, size: {}, header_only_scan], ids=["swallows", "header-only"]
)
def test_scan_check_catches_a_scan_that_misses_bad_files(tmp_path, broken):
    with pytest.raises(AssertionError, match="assert"):
        check_scan(broken, tmp_path)


def test_scan_decodes_each_distinct_file_once(colours, monkeypatch):
    calls = []
    lock = threading.Lock()

    def counting(path, size, **options):
        with lock:
            calls.append(str(path))
        return load_image(path, size, **options)

    monkeypatch.setattr(images_module, "load_image", counting)
    assert scan_images([*colours[:5], *colours[:5], str(colours[0])], SIZE) == {}
    assert sorted(calls) == sorted(map(str, colours[:5]))


def test_scan_takes_the_limit_of_pixels_and_accepts_no_files(colours):
    found = scan_images(colours, SIZE, max_pixels=100)
    assert sorted(found) == list(range(0, 60, 7))
    assert scan_images([], SIZE) == {}
    with pytest.raises(ValueError, match="workers must be"):
        scan_images(colours, SIZE, workers=0)


def rows_of(images):
    """The row of each solid photo, read from its colour."""
    solid = np.asarray(images).reshape(len(images), -1, 3).astype(int)
    assert (solid == solid[:, :1]).all()
    red, green, blue = solid[:, 0].T
    assert (green == 4 * red).all()
    assert (blue == 255 - red).all()
    return red.tolist()


def check_order(dataset, order):
    """Two passes over batches of seven, each in the wanted order."""
    for _ in range(2):
        batches = [rows_of(batch) for batch in dataset.as_numpy_iterator()]
        assert [len(batch) for batch in batches] == [7] * 8 + [4]
        assert list(chain.from_iterable(batches)) == list(order)


def test_order_check_catches_sorting_by_name_shuffling_and_racing_workers(colours):
    import tensorflow as tf

    order = np.random.default_rng(1).permutation(60)
    paths = [colours[i] for i in order]

    def slow_first(row):
        time.sleep(0.2 if row == 0 else 0)
        return load_image(paths[row], SIZE)

    def racing(row):
        return tf.ensure_shape(tf.numpy_function(slow_first, [row], tf.uint8), (SIZE, SIZE, 3))

    rows = tf.data.Dataset.range(60).map(racing, num_parallel_calls=8, deterministic=False)
    broken = {
        "sorted": image_dataset(sorted(paths), SIZE, 7),
        "shuffled": image_dataset(paths, SIZE, 7, shuffle=True),
        "racing": rows.prefetch(1).batch(7),
    }
    for dataset in broken.values():
        with pytest.raises(AssertionError, match="assert"):
            check_order(dataset, order)


@pytest.mark.parametrize("workers", [1, 2, 32])
def test_dataset_order_is_that_of_the_paths(colours, workers):
    order = np.random.default_rng(1).permutation(60)
    check_order(image_dataset([colours[i] for i in order], SIZE, 7, workers=workers), order)


def test_dataset_order_holds_when_the_first_photos_take_longest(colours, monkeypatch):
    def slow_start(path, size, **options):
        row = int(os.path.basename(path)[:2])
        time.sleep(0.2 if row in (0, 8, 9) else 0)
        return load_image(path, size, **options)

    monkeypatch.setattr(images_module, "load_image", slow_start)
    dataset = image_dataset(colours, SIZE, 3, workers=16)
    assert list(chain.from_iterable(map(rows_of, dataset.as_numpy_iterator()))) == list(range(60))


def test_dataset_specification_is_static(colours):
    dataset = image_dataset(colours, SIZE, 7)
    assert dataset.element_spec.shape.as_list() == [None, SIZE, SIZE, 3]
    assert dataset.element_spec.dtype == "uint8"
    assert dataset.cardinality() == 9
    dataset = image_dataset(colours, SIZE, 7, labels=range(60), drop_remainder=True, shuffle=True)
    images, labels = dataset.element_spec
    assert images.shape.as_list() == [7, SIZE, SIZE, 3]
    assert labels.shape.as_list() == [7]
    assert labels.dtype == "int64"
    assert dataset.cardinality() == 8
    assert (
        image_dataset(colours, SIZE, 7, labels=np.arange(60, dtype="int32")).element_spec[1].dtype == "int32"
    )


def passes(dataset, count):
    return [
        list(chain.from_iterable(rows_of(images) for images, _ in dataset.as_numpy_iterator()))
        for _ in range(count)
    ]


def test_dataset_shuffle_is_new_every_pass_and_repeats_with_the_seed(colours):
    import keras

    labels = np.arange(60)
    first = passes(image_dataset(colours, SIZE, 7, labels=labels, shuffle=True, seed=3), 3)
    assert all(sorted(order) == list(range(60)) for order in first)
    assert len({tuple(order) for order in first}) == 3
    keras.utils.set_random_seed(99)
    assert passes(image_dataset(colours, SIZE, 7, labels=labels, shuffle=True, seed=3, workers=1), 3) == first
    assert passes(image_dataset(colours, SIZE, 7, labels=labels, shuffle=True, seed=4), 1) != first[:1]


def test_dataset_labels_stay_with_their_photos(colours):
    labels = (np.arange(60) * 37 + 11).astype(np.int32)
    dataset = image_dataset(colours, SIZE, 7, labels=labels, shuffle=True, repeat=True, workers=8)
    seen = []
    for images, batch_labels in dataset.take(20).as_numpy_iterator():
        rows = rows_of(images)
        np.testing.assert_array_equal(batch_labels, labels[rows])
        seen += rows
    assert len(seen) == 140
    assert sorted(seen[:60]) == sorted(seen[60:120]) == list(range(60))


def test_dataset_repeat_is_endless_and_keeps_the_order(colours):
    dataset = image_dataset(colours[:5], SIZE, 4, repeat=True)
    rows = list(chain.from_iterable(rows_of(batch) for batch in dataset.take(5).as_numpy_iterator()))
    assert rows == [0, 1, 2, 3, 4] * 4
    assert dataset.cardinality() == -1


@pytest.mark.parametrize("shuffle", [False, True])
def test_dataset_of_no_photos_is_empty(shuffle):
    dataset = image_dataset([], SIZE, 4, labels=[], shuffle=shuffle)
    assert list(dataset) == []
    assert dataset.element_spec[0].shape.as_list() == [None, SIZE, SIZE, 3]


def test_dataset_error_names_the_file(colours, tmp_path):
    import tensorflow as tf

    (tmp_path / "bad.jpg").write_bytes(b"no image at all")
    dataset = image_dataset([*colours[:3], tmp_path / "bad.jpg"], SIZE, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ImageError: .*bad\.jpg: it is no JPEG"):
        list(dataset)


@pytest.mark.parametrize("labels", [[0, 1], [0.0, 1.0, 2.0], [[0], [1], [2]], ["a", "b", "c"]], ids=str)
def test_dataset_refuses_labels_that_do_not_fit(colours, labels):
    with pytest.raises(ValueError, match=r"labels must be integers of shape \(3,\), one for each path"):
        image_dataset(colours[:3], SIZE, 2, labels=labels)


def test_dataset_and_load_image_give_the_same_pixels(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(photo(300, 200), "JPEG"))
    batch = next(image_dataset([path], 24, 1).as_numpy_iterator())
    np.testing.assert_array_equal(batch[0], load_image(path, 24))


class Terminal(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize(("tty", "enabled"), [(True, True), (True, False), (False, True), (False, False)])
def test_progress_shows_only_when_wanted_and_on_a_terminal(monkeypatch, tty, enabled):
    stream = Terminal(tty)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(3, "reading", "images", enabled) as bar:
        bar.update(3)
    shown = stream.getvalue()
    assert ("reading" in shown and "images/s" in shown and "3/3" in shown) == (tty and enabled)
    assert bool(shown) == (tty and enabled)


def broken_chunk(image):
    """A PNG whose pixels break off in a chunk without a name, which Pillow calls a SyntaxError."""
    data = encoded(image, "PNG")
    start = data.index(b"IDAT") - 4
    (length,) = struct.unpack(">I", data[start : start + 4])
    half = data[start + 8 : start + 8 + length // 2]
    first = struct.pack(">I", len(half)) + b"IDAT" + half + struct.pack(">I", zlib.crc32(b"IDAT" + half))
    return data[:start] + first + data[start : start + 4] + bytes(4) + data[start + 8 :]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_open_photo_is_load_image_before_the_square(tmp_path, form):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if form == "GIF" else {"exif": exif}
    path = tmp_path / "photo"
    path.write_bytes(encoded(photo(300, 200), form, **options))
    opened = open_photo(path)
    assert opened.mode == "RGB"
    assert opened.size == ((300, 200) if form == "GIF" else (200, 300))
    square = opened.resize((150, 150), Image.Resampling.BICUBIC, reducing_gap=3.0)
    np.testing.assert_array_equal(np.asarray(square), load_image(path, 150))


def test_open_photo_lays_transparency_on_white_and_drafts_only_where_asked(tmp_path):
    (tmp_path / "a").write_bytes(encoded(with_alpha(photo()), "PNG"))
    found, wanted = (np.asarray(one) for one in (open_photo(tmp_path / "a"), on_white(with_alpha(photo()))))
    assert difference(found, wanted).max() <= 1
    (tmp_path / "b").write_bytes(encoded(photo(640, 480), "JPEG"))
    assert open_photo(tmp_path / "b", draft_size=100).size == (160, 120)


def test_open_photo_blames_the_photo_for_whatever_is_wrong_with_it(tmp_path):
    (tmp_path / "chunk.png").write_bytes(broken_chunk(photo()))
    with pytest.raises(ImageError, match=r"chunk\.png: the image is broken \(SyntaxError: broken PNG file"):
        open_photo(tmp_path / "chunk.png")
    (tmp_path / "large.png").write_bytes(encoded(photo(), "PNG"))
    with pytest.raises(ImageError, match=r"large\.png: 48 x 32 pixels are more than max_pixels=100"):
        open_photo(tmp_path / "large.png", max_pixels=100)
    with pytest.raises(ValueError, match="draft_size must be a positive integer"):
        open_photo(tmp_path / "large.png", draft_size=0)
