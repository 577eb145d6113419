"""Torch files: what torch wrote is read exactly, and what a stranger wrote can do no harm."""

import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from arcface_keras.backbones.torch_file import read_torch_file, verify_name_digest

FIXTURES = Path(__file__).parent / "fixtures"
REBUILD = "torch._utils _rebuild_tensor_v2"


class Global(NamedTuple):
    name: str


class Call(NamedTuple):
    function: str
    arguments: tuple


class Storage(NamedTuple):
    kind: str
    key: str
    numel: int
    extra: tuple = (None,)


def dump(value: object) -> bytes:
    """Protocol-2 opcodes of a value, written by hand so that no torch is needed."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return pickle.dumps(value, 2)[2:-1]
    if isinstance(value, str):
        return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()
    if isinstance(value, Global):
        module, name = value.name.split()
        return b"c" + f"{module}\n{name}\n".encode()
    if isinstance(value, Call):
        return dump(Global(value.function)) + dump(value.arguments) + b"R"
    if isinstance(value, Storage):
        return dump(("storage", Global(value.kind), value.key, "cpu", value.numel, *value.extra)) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(dump, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(dump, value)) + b"e"
    return b"}(" + b"".join(dump(k) + dump(v) for k, v in value.items()) + b"u"


def one(value: object) -> bytes:
    return b"\x80\x02" + dump(value) + b"."


def tensor(storage: Storage, offset: object, size: object, stride: object) -> Call:
    return Call(REBUILD, (storage, offset, size, stride, False, Call("collections OrderedDict", ())))


def legacy(body: bytes, storages: dict[str, bytes], numels: dict[str, int], keys: object = None) -> bytes:
    head = one(0x1950A86A20F9469CFC6C) + one(1001) + one({"protocol_version": 1001, "little_endian": True})
    tail = one(list(storages) if keys is None else keys)
    for key, data in storages.items():
        tail += numels[key].to_bytes(8, "little") + data
    return head + body + tail


def zipped(body: bytes, storages: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("model/data.pkl", body)
        for key, data in storages.items():
            archive.writestr(f"model/data/{key}", data)
    return buffer.getvalue()


FLOATS = np.arange(12, dtype="<f4")
TWELVE = Storage("torch FloatStorage", "0", 12)


def both_layouts(state: object, data: bytes = FLOATS.tobytes(), numel: int = 12) -> dict[str, bytes]:
    return {"legacy": legacy(one(state), {"0": data}, {"0": numel}), "zip": zipped(one(state), {"0": data})}


@pytest.fixture(params=["legacy", "zip"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["small_legacy.pth", "small_zip.pth"])
def test_torch_file_of_torch_itself_reads_exactly(name: str) -> None:
    state = read_torch_file(FIXTURES / name)
    shapes = {
        "0.weight": (4, 3, 3, 3), "0.bias": (4,), "1.weight": (4,), "1.bias": (4,), "1.running_mean": (4,),
        "1.running_var": (4,), "1.num_batches_tracked": (),
    }  # fmt: skip
    assert list(state) == [*shapes, "transposed"]
    for index, (key, shape) in enumerate(shapes.items()):
        expected = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1000 * index
        np.testing.assert_array_equal(state[key], expected, err_msg=key)
    np.testing.assert_array_equal(state["transposed"], state["0.weight"].transpose(2, 3, 1, 0))
    assert state["0.weight"].dtype == np.float32
    assert state["1.num_batches_tracked"].dtype == np.int64


@pytest.mark.parametrize(
    ("offset", "size", "stride", "expected"),
    [
        (0, (3, 4), (4, 1), FLOATS.reshape(3, 4)),
        (0, (4, 3), (1, 4), FLOATS.reshape(3, 4).T),
        (5, (2, 3), (3, 1), FLOATS[5:11].reshape(2, 3)),
        (11, (), (), FLOATS[11]),
        (11, (1, 1), (2**40, 7), FLOATS[11:].reshape(1, 1)),
        (12, (0, 5), (5, 1), np.empty((0, 5))),
        (0, (6,), (2,), FLOATS[::2]),
    ],
    ids=["plain", "transposed", "offset", "scalar", "single", "empty", "every second"],
)
def test_torch_file_view_is_cut_out_of_its_storage(tmp_path, layout, offset, size, stride, expected) -> None:
    path = write(tmp_path, both_layouts({"w": tensor(TWELVE, offset, size, stride)})[layout])
    received = read_torch_file(path)["w"]
    assert received.shape == np.shape(expected)
    np.testing.assert_array_equal(received, expected)
    assert not received.flags.writeable or received.size == 0


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "b1"])
def test_torch_file_keeps_the_dtype_of_every_storage(tmp_path, layout, dtype) -> None:
    names = {
        "f8": "Double", "f4": "Float", "f2": "Half", "i8": "Long", "i4": "Int", "i2": "Short", "i1": "Char",
        "u1": "Byte", "b1": "Bool",
    }  # fmt: skip
    values = np.array([0, 1, 1, 0]).astype(dtype)
    storage = Storage(f"torch {names[dtype]}Storage", "0", 4)
    content = both_layouts({"w": tensor(storage, 0, (4,), (1,))}, values.tobytes(), 4)[layout]
    received = read_torch_file(write(tmp_path, content))["w"]
    assert received.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(received, values)


@pytest.mark.parametrize(
    "name",
    ["os system", "posix system", "builtins eval", "builtins getattr", "torch load", "collections Counter",
     "torch._utils _rebuild_parameter", "torch BFloat16Storage", "numpy load"],
)  # fmt: skip
def test_torch_file_names_the_forbidden_global(tmp_path, layout, name) -> None:
    marker = tmp_path / "ran"
    state = {"w": Call(name, (f"touch {marker}",))}
    module, attribute = name.split()
    with pytest.raises(ValueError, match=rf"global {module}\.{attribute}, which is not allowed"):
        read_torch_file(write(tmp_path, both_layouts(state)[layout]))
    assert not marker.exists()


def test_torch_file_test_would_notice_a_plain_unpickler(tmp_path) -> None:
    marker = tmp_path / "ran"
    pickle.loads(one(Call("os system", (f"touch {marker}",))))
    assert marker.exists()


REACHING = {
    "offset behind the end": (12, (1,), (1,)),
    "last element behind the end": (1, (3, 4), (4, 1)),
    "stride behind the end": (0, (2,), (12,)),
    "stride overflowing": (0, (2,), (2**61,)),
    "repeats": (0, (13,), (0,)),
    "huge repeats": (0, (2**40, 2**20), (0, 0)),
    "empty with huge offset": (2**60, (0,), (1,)),
}


@pytest.mark.parametrize("case", REACHING)
def test_torch_file_refuses_to_reach_outside_a_storage(tmp_path, layout, case) -> None:
    content = both_layouts({"w": tensor(TWELVE, *REACHING[case])})[layout]
    with pytest.raises(ValueError, match="'w' reaches outside its storage of 12 elements"):
        read_torch_file(write(tmp_path, content))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (11, (2,), (-1,)),
        (True, (1,), (1,)),
        (0, ("1",), (1,)),
        (2**70, (1,), (1,)),
    ],
)
def test_torch_file_refuses_numbers_that_are_no_counts(tmp_path, layout, offset, size, stride) -> None:
    content = both_layouts({"w": tensor(TWELVE, offset, size, stride)})[layout]
    with pytest.raises(ValueError, match="must be counts"):
        read_torch_file(write(tmp_path, content))


def test_torch_file_of_an_absurd_size_costs_no_memory(tmp_path, layout) -> None:
    huge = Storage("torch FloatStorage", "0", 2**50)
    state = {"w": tensor(huge, 0, (2**50,), (1,))}
    path = write(tmp_path, both_layouts(state, numel=2**50)[layout])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"storage '0' does not have its {2**50} elements"):
            read_torch_file(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_torch_file_with_an_absurd_memo_index_costs_no_memory(tmp_path, layout) -> None:
    body = b"\x80\x02}r" + (2**31).to_bytes(4, "little") + b"."
    content = legacy(body, {}, {}) if layout == "legacy" else zipped(body, {})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="memo index 2147483648"):
            read_torch_file(write(tmp_path, content))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_torch_file_cut_at_any_byte_is_an_error(tmp_path, layout) -> None:
    content = both_layouts({"w": tensor(TWELVE, 0, (12,), (1,))})[layout]
    for length in range(0, len(content) - 1, 7):
        with pytest.raises(ValueError, match=r"weights\.pth must be a torch file"):
            read_torch_file(write(tmp_path, content[:length]))


def test_torch_file_that_is_a_compressed_archive_is_refused(tmp_path) -> None:
    state = one({"w": tensor(TWELVE, 0, (12,), (1,))})
    with pytest.raises(ValueError, match=r"data\.pkl' is compressed"):
        read_torch_file(write(tmp_path, zipped(state, {"0": FLOATS.tobytes()}, zipfile.ZIP_DEFLATED)))


def test_torch_file_with_an_inconsistent_storage_is_refused(tmp_path) -> None:
    longer = TWELVE._replace(numel=13)
    state = {"a": tensor(TWELVE, 0, (1,), (1,)), "b": tensor(longer, 0, (1,), (1,))}
    with pytest.raises(ValueError, match="storage '0' is described in two ways"):
        read_torch_file(write(tmp_path, both_layouts(state)["legacy"]))
    good = one({"w": tensor(TWELVE, 0, (12,), (1,))})
    with pytest.raises(ValueError, match="storage keys are not those of its tensors"):
        read_torch_file(write(tmp_path, legacy(good, {"0": FLOATS.tobytes()}, {"0": 12}, keys=["0", "0"])))
    view = TWELVE._replace(extra=(("1", 0, 12),))
    with pytest.raises(ValueError, match="is a view of another"):
        read_torch_file(write(tmp_path, both_layouts({"w": tensor(view, 0, (12,), (1,))})["legacy"]))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "holds a list, not a dictionary"),
        ({"epoch": 3}, "entry 'epoch' is a int, not a tensor"),
        ({"state_dict": {"w": 1}}, "entry 'state_dict' is a dict, not a tensor"),
        ({"w": TWELVE}, "entry 'w' is a _Storage, not a tensor"),
        ({3: tensor(TWELVE, 0, (1,), (1,))}, "entry 'int' is a _Tensor"),
        ({"w": Call(REBUILD, (1, 0, (1,), (1,)))}, "not described by a storage"),
        ({"w": Call("torch FloatStorage", (12,))}, "not callable"),
    ],
)
def test_torch_file_that_holds_something_else_says_what(tmp_path, layout, state, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_torch_file(write(tmp_path, both_layouts(state)[layout]))


def test_torch_file_of_another_kind_is_an_error(tmp_path) -> None:
    for content in (b"", b"hello", pickle.dumps({"w": 1}), b"PK\x03\x04nothing", os.urandom(200)):
        with pytest.raises(ValueError, match=r"weights\.pth must be a torch file"):
            read_torch_file(write(tmp_path, content))
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        read_torch_file(tmp_path / "absent.pth")


def test_name_digest_is_compared_with_the_content(tmp_path) -> None:
    good = tmp_path / "model-2cf24dba.pth"
    good.write_bytes(b"hello")
    verify_name_digest(good)
    damaged = tmp_path / "model-2cf24dbb.pth"
    damaged.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"model-2cf24dbb\.pth must begin with the 2cf24dbb of its name"):
        verify_name_digest(damaged)
    plain = tmp_path / "model.pth"
    plain.write_bytes(b"anything")
    verify_name_digest(plain)
