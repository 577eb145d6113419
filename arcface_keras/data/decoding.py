"""One photo to one square of pixels: the only way an image enters, in training and inference alike."""

import contextlib
import importlib
import math
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.data.remote import RemoteError, is_url, open_binary

MAX_PIXELS = 100_000_000

# The plug-ins are called directly: `Image.open` would guess among fifty formats (some start other
# programs) and warn about big images before their size can be compared with max_pixels.
_PLUGINS = {
    b"\xff\xd8\xff": "JpegImagePlugin.JpegImageFile",
    b"\x89PNG\r\n\x1a\n": "PngImagePlugin.PngImageFile",
    b"GIF8": "GifImagePlugin.GifImageFile",
    b"RIFF": "WebPImagePlugin.WebPImageFile",
    b"BM": "BmpImagePlugin.BmpImageFile",
    b"II*\0": "TiffImagePlugin.TiffImageFile",
    b"MM\0*": "TiffImagePlugin.TiffImageFile",
}
_ORIENTATION = 0x0112
_DRAFT_GAP = 1.5
_REDUCING_GAP = 3.0


class ImageError(ValueError):
    """An image file cannot be used; `path` names it and `reason` says why."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")


def load_image(path: str | os.PathLike[str], image_size: int, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read one photo as the square of RGB pixels that every model of this package is trained on and fed with.

    JPEG (grey, CMYK, YCCK, progressive), PNG, GIF (first frame), WebP, BMP and TIFF; the content decides,
    not the name. EXIF orientation is applied. Transparency is laid on white. 16-bit, 32-bit and float
    grey values are scaled from the smallest of the full scales 1 (floats only), 255, 65535 and 2**32 - 1
    that holds them all (16-bit files: always 65535). Colour profiles are ignored.

    The photo is stretched to the square (the aspect is not kept, nothing is cropped) with Pillow's
    antialiased bicubic filter. A JPEG of three times `image_size` or more is decoded at 1/2, 1/4 or 1/8,
    never below 1.5 times `image_size`; for nine-photo mosaics of 700 px at 224 px this halves the time
    and moves the pixels by 0.9 of 255 grey levels on average (99 % by less than 5), at 160 px by 0.6.

    Args:
        path: the file, or its URL (see `arcface_keras.data.remote`).
        image_size: side of the square in pixels.
        max_pixels: largest width x height accepted, compared with the file's header before decoding.

    Returns:
        uint8 of shape (image_size, image_size, 3), RGB, 0..255.

    Raises:
        ImageError: the file is absent, unreadable, empty, truncated, no image, or has more than `max_pixels`.
        RemoteError: the server behind a URL cannot be reached, or refuses: no fault of this photo.
        ValueError: `image_size` or `max_pixels` is no positive integer.
        ImportError: Pillow is missing; a photo is not to blame for that.
    """
    check_count("image_size", image_size)
    photo = open_photo(path, draft_size=math.ceil(_DRAFT_GAP * image_size), max_pixels=max_pixels)
    with _blaming(path):
        return _square(photo, image_size)


def open_photo(
    path: str | os.PathLike[str], *, draft_size: int | None = None, max_pixels: int = MAX_PIXELS
) -> Any:
    """Open one photo as `load_image` does, before it is made a square: upright, 8-bit RGB, wholly decoded.

    Args:
        path: the file, or its URL.
        draft_size: decode a JPEG at 1/2, 1/4 or 1/8 where no side falls below this; None at its own size.
        max_pixels: largest width x height accepted, compared with the file's header before decoding.

    Returns:
        A Pillow image of mode RGB.

    Raises:
        ImageError, RemoteError, ImportError: as `load_image`.
        ValueError: `draft_size` or `max_pixels` is no positive integer.
    """
    check_count("max_pixels", max_pixels)
    if draft_size is not None:
        check_count("draft_size", draft_size)
    _require_pillow()
    with opened_image(path, max_pixels) as image:
        if draft_size is not None:
            image.draft("RGB", (draft_size, draft_size))
        image.load()
        return _upright(_flatten(image), _orientation(image))


@contextlib.contextmanager
def opened_image(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Iterator[Any]:
    """The Pillow image as the file has it, not yet decoded; what fails within is an error of `open_photo`."""
    with _blaming(path), _open_regular(path) as file:
        yield _open_image(file, path, max_pixels)


@contextlib.contextmanager
def _blaming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever goes wrong with the photo itself becomes an ImageError."""
    try:
        yield
    except (ImageError, RemoteError):
        raise
    except OSError as error:
        raise ImageError(path, f"the image cannot be read ({error.strerror or error})") from error
    except Exception as error:  # decoders meet strangers' bytes and raise whatever they stumble over
        raise ImageError(path, f"the image is broken ({type(error).__name__}: {error})") from error


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("reading photos needs Pillow: pip install 'pillow>=10.3'.") from error


def _open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    if is_url(path):
        try:
            return open_binary(path)
        except (ImportError, ValueError) as error:
            raise RemoteError(str(error)) from error
    # A pipe would block for ever and a folder gives another error on every system: look before opening.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ImageError(path, "it is no file")
    return open(path, "rb")


def _open_image(file: IO[bytes], path: str | os.PathLike[str], max_pixels: int) -> Any:
    head = file.read(32)
    file.seek(0)
    if not head:
        raise ImageError(path, "the file is empty")
    name = next((plugin for signature, plugin in _PLUGINS.items() if head.startswith(signature)), None)
    if name is None or (head[:4] == b"RIFF" and head[8:12] != b"WEBP"):
        raise ImageError(
            path, f"it is no JPEG, PNG, GIF, WebP, BMP or TIFF image (it begins with {head[:12]!r})"
        )
    _check_pixels(_webp_size(head), path, max_pixels)
    module, attribute = name.split(".")
    image = getattr(importlib.import_module(f"PIL.{module}"), attribute)(file)
    _check_pixels(image.size, path, max_pixels)
    return image


def _check_pixels(size: tuple[int, int], path: str | os.PathLike[str], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageError(path, f"{width} x {height} pixels are more than max_pixels={max_pixels}")


def _webp_size(head: bytes) -> tuple[int, int]:
    """Return the size in a WebP header, (0, 0) for anything else; Pillow allocates its canvas on opening."""
    kind, little = head[12:16], int.from_bytes
    if head[:4] != b"RIFF" or len(head) < 30:
        return 0, 0
    if kind == b"VP8X":
        return little(head[24:27], "little") + 1, little(head[27:30], "little") + 1
    if kind == b"VP8L":
        bits = little(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return little(head[26:28], "little") & 0x3FFF, little(head[28:30], "little") & 0x3FFF


def _orientation(image: Any) -> int:
    """Return the EXIF orientation 1..8; a photo with unreadable EXIF data is taken as it lies."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


def _upright(image: Any, orientation: int) -> Any:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _flatten(image: Any) -> Any:
    """Return `image` as 8-bit RGB on white."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode == "LAB":
        return _lab_to_rgb(image)
    if image.has_transparency_data:
        # La and RGBa hold premultiplied colours; each converts only to its own plain mode.
        plain = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)
        image = (image.convert(plain) if plain else image).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _eight_bits(image: Any) -> np.ndarray:
    """Scale grey values of more than eight bits to uint8; NaN and negative values become 0."""
    values = np.asarray(image)
    scales = (65535,) if image.mode.startswith("I;16") or image.format == "PNG" else (255, 65535, 2**32 - 1)
    values = np.clip(np.nan_to_num(values.astype(np.float64)), 0, None)
    top = values.max()
    full = next((scale for scale in (*((1,) if image.mode == "F" else ()), *scales) if top <= scale), top)
    return np.rint(values * (255.0 / full)).astype(np.uint8)


def _lab_to_rgb(image: Any) -> Any:
    from PIL import ImageCms

    transform = ImageCms.buildTransform(
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
    )
    return ImageCms.applyTransform(image, transform)


def _square(image: Any, image_size: int) -> np.ndarray:
    from PIL.Image import Resampling

    size = (image_size, image_size)
    return np.asarray(image.resize(size, Resampling.BICUBIC, reducing_gap=_REDUCING_GAP))
