"""Reads the tensors of a torch weights file (`.pth`) without torch and without trusting the file.

A `.pth` file is a pickle, and a pickle is a program. Two guards make it data again: every opcode
stream is scanned before it runs (no memo index or string may be larger than the stream itself), and the
unpickler knows only the globals that a dictionary of tensors needs; any other name is refused. Tensors
are described by plain tuples while the pickle runs and cut out of the storages afterwards, each
one checked against the bytes that are really there.

Both layouts of `torch.save` are read: the legacy one (magic number, protocol, system facts, pickle,
storage keys, storages) and the zip archive (`data.pkl` and one stored member a storage).
"""

import collections
import hashlib
import io
import math
import os
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_MAX_DIMENSIONS = 16
_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8})\.pth$")
_STORAGE_DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "|b1",
}


class _StorageType(NamedTuple):
    dtype: str


class _Storage(NamedTuple):
    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * np.dtype(self.dtype).itemsize


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:
    """Stand-in for `torch._utils._rebuild_tensor_v2`: notes the tensor, touches no data."""
    if type(storage) is not _Storage or type(size) is not tuple or type(stride) is not tuple:
        raise pickle.UnpicklingError("a tensor is not described by a storage, an offset, a size and a stride")
    if len(size) != len(stride) or len(size) > _MAX_DIMENSIONS:
        raise pickle.UnpicklingError(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    if not all(map(_is_count, (offset, *size, *stride))):
        raise pickle.UnpicklingError("offset, size and stride of a tensor must be counts")
    return _Tensor(storage, offset, size, stride)


class _TensorUnpickler(pickle.Unpickler):
    """Knows the globals of a dictionary of tensors and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in _STORAGE_DTYPES:
            return _StorageType(_STORAGE_DTYPES[name])
        raise pickle.UnpicklingError(
            f"it asks for the global {module[:80]}.{name[:80]}, which is not allowed"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise pickle.UnpicklingError("a persistent id does not name a storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if type(kind) is not _StorageType or type(key) is not str or not _is_count(numel):
            raise pickle.UnpicklingError("a storage is not described by a type, a key and a length")
        if len(pid) == 6 and pid[5] is not None:
            raise pickle.UnpicklingError("a storage is a view of another, which is not supported")
        return _Storage(key, kind.dtype, numel)


def _load_pickle(stream: IO[bytes]) -> Any:
    """One pickle from the stream, which is left at the byte after it."""
    start = stream.tell()
    largest_memo = 0
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument is not None:
            largest_memo = max(largest_memo, int(argument))
    length = stream.tell() - start
    # The C unpickler keeps its memo in an array as long as the largest index it is told.
    if largest_memo > length:
        raise pickle.UnpicklingError(f"memo index {largest_memo} in a pickle of {length} bytes")
    stream.seek(start)
    return _TensorUnpickler(io.BytesIO(stream.read(length))).load()


def _tensors_of(state: Any) -> dict[str, _Tensor]:
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"it holds a {type(state).__name__}, not a dictionary of tensors")
    for name, value in state.items():
        if type(name) is not str or type(value) is not _Tensor:
            shown = name[:80] if type(name) is str else type(name).__name__
            raise pickle.UnpicklingError(f"its entry {shown!r} is a {type(value).__name__}, not a tensor")
    return dict(state)


def _storages_of(tensors: dict[str, _Tensor]) -> dict[str, _Storage]:
    storages: dict[str, _Storage] = {}
    for tensor in tensors.values():
        if storages.setdefault(tensor.storage.key, tensor.storage) != tensor.storage:
            raise pickle.UnpicklingError(f"storage {tensor.storage.key[:80]!r} is described in two ways")
    return storages


def _cut(name: str, tensor: _Tensor, data: bytes) -> np.ndarray:
    """The tensor as a read-only view of its storage, after its reach was checked."""
    storage, offset, size, stride = tensor
    elements = math.prod(size)
    steps = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    end = offset + steps + 1 if elements else offset
    # More elements than the storage has can only be repeats (stride 0): a small file must stay small.
    if elements > storage.numel or end > storage.numel or len(data) != storage.nbytes:
        raise pickle.UnpicklingError(
            f"tensor {name[:80]!r} reaches outside its storage of {storage.numel} elements"
        )
    if not elements:
        return np.empty(size, dtype=storage.dtype)
    flat = np.frombuffer(data, dtype=storage.dtype)
    strides = [step * flat.itemsize if n > 1 else 0 for n, step in zip(size, stride, strict=True)]
    return np.lib.stride_tricks.as_strided(flat[offset:], shape=size, strides=strides, writeable=False)


def _read_legacy(stream: IO[bytes], file_bytes: int) -> dict[str, np.ndarray]:
    if _load_pickle(stream) != _LEGACY_MAGIC or _load_pickle(stream) != _LEGACY_PROTOCOL:
        raise pickle.UnpicklingError("its magic number is not that of a torch file")
    system = _load_pickle(stream)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise pickle.UnpicklingError("it was not written on a little-endian machine")
    tensors = _tensors_of(_load_pickle(stream))
    storages = _storages_of(tensors)
    keys = _load_pickle(stream)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise pickle.UnpicklingError("its storage keys are not a list of names")
    if sorted(keys) != sorted(storages):
        raise pickle.UnpicklingError("its storage keys are not those of its tensors")
    data = {}
    for key in keys:
        stored = int.from_bytes(stream.read(8), "little")
        storage = storages[key]
        if stored != storage.numel or storage.nbytes > file_bytes - stream.tell():
            raise pickle.UnpicklingError(f"storage {key[:80]!r} does not have its {storage.numel} elements")
        data[key] = stream.read(storage.nbytes)
    return {name: _cut(name, tensor, data[tensor.storage.key]) for name, tensor in tensors.items()}


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        raise pickle.UnpicklingError(f"member {name[:80]!r} is compressed, which torch does not do")
    return archive.read(info)


def _read_zip(stream: IO[bytes]) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(stream) as archive:
        roots = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise pickle.UnpicklingError("it is a zip archive without exactly one data.pkl")
        root = roots[0]
        if f"{root}byteorder" in archive.namelist() and _member(archive, f"{root}byteorder") != b"little":
            raise pickle.UnpicklingError("it was not written on a little-endian machine")
        tensors = _tensors_of(_load_pickle(io.BytesIO(_member(archive, f"{root}data.pkl"))))
        data = {}
        for key, storage in _storages_of(tensors).items():
            if archive.getinfo(f"{root}data/{key}").file_size != storage.nbytes:
                raise pickle.UnpicklingError(
                    f"storage {key[:80]!r} does not have its {storage.numel} elements"
                )
            data[key] = _member(archive, f"{root}data/{key}")
    return {name: _cut(name, tensor, data[tensor.storage.key]) for name, tensor in tensors.items()}


def verify_name_digest(path: str | os.PathLike[str]) -> None:
    """Checks a file named `...-xxxxxxxx.pth` against the first 8 hex digits of its sha256.

    A name without such an ending promises nothing and passes.

    Raises:
        ValueError: if the digits differ.
    """
    match = _DIGEST_IN_NAME.search(Path(path).name)
    if match is None:
        return
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if not digest.startswith(match[1]):
        raise ValueError(
            f"the sha256 of {path} must begin with the {match[1]} of its name; the file is "
            "damaged or was changed. "
            f"Received: sha256={digest}."
        )


def read_torch_file(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a dictionary of tensors saved by `torch.save(model.state_dict(), path)`.

    Args:
        path: a `.pth` file, in the legacy or the zip layout, little-endian.

    Returns:
        The tensors by name, as read-only numpy arrays.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not such a dictionary, if it asks for any global but those of tensors
            (named in the message), or if a tensor does not fit into the bytes the file has.
    """
    file_bytes = os.path.getsize(path)
    with open(path, "rb") as stream:
        try:
            if stream.read(4) == b"PK\x03\x04":
                return _read_zip(stream)
            stream.seek(0)
            return _read_legacy(stream, file_bytes)
        # A damaged pickle can fail in almost any way; each means the same to the caller.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"{path} must be a torch file that holds nothing but a dictionary of tensors, "
                f"but {reason[:300]}. "
                f"Received: path={str(path)!r}."
            ) from error
