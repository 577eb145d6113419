"""Photos as small pictures that a page can hold."""

import base64
import io
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arcface_keras._cores import available_cores
from arcface_keras.data import decoding
from arcface_keras.data.decoding import MAX_PIXELS, ImageError

__all__ = ["data_uri", "data_uris"]

SIDE = 96
_QUALITY = 74


def data_uri(path: str | os.PathLike[str], side: int = SIDE) -> str:
    """The photo as `data:image/jpeg;base64,...`, the longer side `side` pixels; "" if it cannot be read."""
    from PIL import Image

    try:
        with decoding._open_regular(path) as file:
            image = decoding._open_image(file, path, MAX_PIXELS)
            image.draft("RGB", (2 * side, 2 * side))
            image.load()
            image = decoding._upright(decoding._flatten(image), decoding._orientation(image))
        scale = side / max(image.size)
        size = tuple(max(1, math.floor(length * scale)) for length in image.size)
        small = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=_QUALITY, optimize=True)
    except (ImageError, OSError):
        return ""
    except Exception:  # decoders meet strangers' bytes and raise whatever they stumble over
        return ""
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def data_uris(paths: Iterable[Path], workers: int | None = None) -> dict[Path, str]:
    """`data_uri` of every path, each read once."""
    wanted = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(workers or available_cores()) as pool:
        return dict(zip(wanted, pool.map(data_uri, wanted), strict=True))
