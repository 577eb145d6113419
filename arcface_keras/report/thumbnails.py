"""Photos as small pictures that a page can hold."""

import base64
import io
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arcface_keras._cores import available_cores
from arcface_keras.data.decoding import ImageError, open_photo
from arcface_keras.data.remote import RemoteError

__all__ = ["data_uri", "data_uris"]

SIDE = 96
_QUALITY = 74


def data_uri(path: str | os.PathLike[str], side: int = SIDE) -> str:
    """The photo as `data:image/jpeg;base64,...`, the longer side `side` pixels; "" if it cannot be read."""
    from PIL import Image

    try:
        image = open_photo(path, draft_size=2 * side)
    except (ImageError, RemoteError):
        return ""
    scale = side / max(image.size)
    size = tuple(max(1, math.floor(length * scale)) for length in image.size)
    small = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=_QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def data_uris(paths: Iterable[Path], workers: int | None = None) -> dict[Path, str]:
    """`data_uri` of every path, each read once."""
    wanted = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(workers or available_cores()) as pool:
        return dict(zip(wanted, pool.map(data_uri, wanted), strict=True))
