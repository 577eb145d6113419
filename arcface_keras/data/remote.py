"""Files behind URLs, by way of fsspec and the library that it names for each protocol."""

import errno
import importlib
import io
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar

__all__ = [
    "RemoteError",
    "RemotePath",
    "RemoteRefusedError",
    "is_url",
    "located",
    "open_binary",
    "reason_if_refused_alone",
]

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
_ON_THIS_MACHINE = re.compile(r"(file|local)://", re.IGNORECASE)
_WAITS = (1.0, 4.0)
"""Seconds before the second and the third attempt to reach a server."""

_WITNESSES = 8


class RemoteError(ConnectionError):
    """What is behind a URL cannot be told: no right, no connection, no such server."""


class RemoteRefusedError(RemoteError):
    """The server refuses: no right to this file, or to know that there is none, or to anything any more."""


class RemotePath(os.PathLike[str]):
    """A file or folder behind a URL, with what this package needs of a `pathlib.Path`.

    Chains of fsspec (`zip://photos::s3://bucket/all.zip`) are URLs as well.

    Args:
        url: anything that fsspec can open.

    Example:
        >>> (RemotePath("s3://bucket/photos") / "1.jpg").url
        's3://bucket/photos/1.jpg'
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "RemotePath":
        first, sign, rest = self.url.partition("::")
        return RemotePath(f"{first.rstrip('/')}/{name}{sign}{rest}")

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.url.partition("::")[0].rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return Path(self.name).suffix

    def resolve(self) -> "RemotePath":
        """Itself."""
        return self

    def read_bytes(self) -> bytes:
        """All of the file, in one request, tried three times where the server cannot be reached.

        Raises:
            FileNotFoundError, IsADirectoryError: there is no such file.
            RemoteError: anything else that keeps it from being read.
            ImportError: fsspec, or its library for the protocol, is not installed.
            ValueError: fsspec knows no such protocol.
        """
        return self._asked(lambda files, path: files.cat_file(path))

    def is_shown(self) -> bool:
        """Whether the server shows the file, now and at the first attempt; its first byte is asked for."""
        try:
            files, path = self._filesystem()
            files.cat_file(path, start=0, end=1)
        except Exception:  # each library of fsspec has errors of its own
            return False
        return True

    def stat(self) -> Any:
        """`st_size`, as the server tells it; errors as for `read_bytes`."""
        return SimpleNamespace(st_size=int(self._asked(lambda files, path: files.size(path)) or 0))

    def is_dir(self) -> bool:
        """Whether there is a folder, or anything whose name begins like one; a request or two.

        A server that has no folders (http) or shows none without a right to it is believed.

        Raises:
            RemoteError: the server cannot be reached.
            ImportError, ValueError: as for `read_bytes`.
        """
        if self.url.lower().startswith(("http://", "https://")):
            self._filesystem()
            return True
        try:
            return bool(self._asked(lambda files, path: files.info(path)["type"] != "file"))
        except FileNotFoundError:
            return False
        except RemoteRefusedError:
            return True

    def _filesystem(self) -> tuple[Any, str]:
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise ImportError(
                f"files behind URLs need the package fsspec: pip install 'arcface-keras[url]'. "
                f"Received: {self.url}."
            ) from error
        try:
            return fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(f"{self.url} needs another package: {error}") from error
        except ValueError as error:
            known = ", ".join(sorted(fsspec.available_protocols()))
            raise ValueError(
                f"a URL must have a protocol that fsspec knows: {known}. Received: {self.url} ({error})."
            ) from error
        except FileNotFoundError:
            raise
        except Exception as error:  # an archive that is none, a server that refuses the session, ...
            raise RemoteError(f"{self.url} must be readable. Received: {_shown(error)}.") from error

    def _asked(self, ask: Callable[[Any, str], T]) -> T:
        files, path = self._filesystem()
        waits = iter(_WAITS)
        while True:
            try:
                return ask(files, path)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                number = error.errno or errno.ENOENT
                raise type(error)(number, os.strerror(number), self.url) from error
            except Exception as error:  # each library of fsspec has errors of its own
                refused = isinstance(error, PermissionError)
                wait = None if refused else next(waits, None)
                if wait is None:
                    kind = RemoteRefusedError if refused else RemoteError
                    raise kind(f"{self.url} must be readable. Received: {_shown(error)}.") from error
                time.sleep(wait)


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether a location is behind a URL; `file://` and `local://` are of this machine."""
    text = os.fspath(location)
    return bool(_URL.match(text)) and not _ON_THIS_MACHINE.match(text)


def located(location: str | os.PathLike[str]) -> Path | RemotePath:
    """The path of a file or folder, on this machine or behind a URL; `file:///a` is `/a`."""
    text = os.fspath(location)
    if is_url(text):
        return RemotePath(text)
    return Path(_ON_THIS_MACHINE.sub("", text))


def reason_if_refused_alone(refusal: RemoteRefusedError, name: str, names: Sequence[str]) -> str:
    """Why one of many files cannot be read, if the server shows some of the others.

    S3 answers 403 for a file that is not there to whoever may not list the folder. That must not be taken for
    rights that have ended, nor these for it: all files from then on would count as unreadable. So a few of
    the others, evenly spread, are asked for a byte.

    Raises:
        RemoteRefusedError: `refusal`, where none of them is shown.
    """
    others = [other for other in names if other != name]
    if not any(RemotePath(other).is_shown() for other in others[:: max(1, len(others) // _WITNESSES)]):
        raise refusal
    return f"the server does not show it, but others ({_shown(refusal.__cause__ or refusal)})"


def open_binary(location: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading, wherever it is; one behind a URL is read at once, in one request.

    Raises:
        OSError: it is not there or cannot be read.
        RemoteError: it is behind a URL that cannot be reached or read.
    """
    path = located(location)
    return io.BytesIO(path.read_bytes()) if isinstance(path, RemotePath) else path.open("rb")


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
