"""From the bytes of a picture to the square of bytes that training needs.

JPEG is decoded by simplejpeg where it is installed, everything else (and every JPEG
that it refuses, such as CMYK) by Pillow; both give the same pixels. The shorter side is
scaled to the wanted size with antialiasing and the centre is cropped. The measurements
behind this are in docs/decisions/0002-image-decoder.md.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from paceline.schema.signature import Pictures

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# Part of the key of cached images: change it when pixels change.
DECODER_VERSION = "1"
SMALLEST_SIDE = 8
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif"}
    | {".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
MEAN: tuple[float, ...] = (0.485, 0.456, 0.406)
DEVIATION: tuple[float, ...] = (0.229, 0.224, 0.225)
ORIENTATION_TAG = 0x0112
# What Pillow raises for damaged files, by format.
DECODE_ERRORS = (
    OSError,
    UnidentifiedImageError,
    Image.DecompressionBombError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    TypeError,
    ArithmeticError,
)


class ImageDamagedError(Exception):
    """This picture cannot be used; the text says why."""


def decode_image(data: bytes, size: int, channels: int) -> np.ndarray:
    """The picture as bytes, (channels, size, size); ImageDamagedError when it cannot be."""
    try:
        return _to_square(_decode(data, size, channels), size)
    except DECODE_ERRORS as error:
        raise ImageDamagedError(" ".join(str(error).split()) or type(error).__name__) from error


def _decode(data: bytes, size: int, channels: int) -> np.ndarray:
    """Pixels (height, width, channels), upright, at least `size` on each side where they were."""
    if simplejpeg is not None and data[:3] == b"\xff\xd8\xff" and _upright(data):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            # Halving inside the JPEG transform is fast; odd factors are slower than none. The
            # factor is the one that Pillow's draft takes, so that both give the same pixels.
            room = min(width // size, height // size)
            factor = next((one for one in (8, 4, 2) if room >= one), 1)
            pixels: np.ndarray = simplejpeg.decode_jpeg(
                data,
                colorspace="RGB" if channels == 3 else "GRAY",
                min_height=-(-height // factor),
                min_width=-(-width // factor),
                min_factor=2,
            )
            return pixels
        except ValueError:
            pass  # CMYK, or a file that is strictly speaking faulty: Pillow decides.
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB" if channels == 3 else "L", (size, size))
        upright = ImageOps.exif_transpose(image)
        converted = np.array(_converted(upright, channels))
    return converted.reshape(*converted.shape[:2], channels)


def _upright(data: bytes) -> bool:
    """Whether the JPEG needs no turning by its EXIF orientation."""
    if data.find(b"Exif\x00\x00", 0, 65536) < 0:
        return True
    with Image.open(io.BytesIO(data)) as image:
        return bool(image.getexif().get(ORIENTATION_TAG, 1) == 1)


def _converted(image: Image.Image, channels: int) -> Image.Image:
    mode = "RGB" if channels == 3 else "L"
    if image.mode == mode:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        # 16 bits per pixel: Pillow would cut off everything above 255.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype("u1"))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _to_square(pixels: np.ndarray, size: int) -> np.ndarray:
    import torch
    from torch.nn import functional

    height, width = pixels.shape[:2]
    side = min(height, width)
    if side < SMALLEST_SIDE:
        raise ImageDamagedError(_too_small(width, height))
    top, left = (height - side) // 2, (width - side) // 2
    square = np.ascontiguousarray(pixels[top : top + side, left : left + side])
    if side != size:
        block = torch.from_numpy(square).permute(2, 0, 1)[None]
        scaled = functional.interpolate(block, size=(size, size), mode="bilinear", antialias=True)
        return np.ascontiguousarray(scaled[0].numpy())
    return np.ascontiguousarray(square.transpose(2, 0, 1))


def _too_small(width: int, height: int) -> str:
    return f"{width}x{height} pixels: a side is shorter than {SMALLEST_SIDE}"


def quick_check(path: Path) -> str | None:
    """Why this file cannot be used, found without decoding it, or None.

    Reads the header and the last bytes: empty files, other formats under an image's
    name, tiny pictures and files that were cut short are found. A JPEG or PNG whose end
    is not where it should be is decoded to be sure. Damage inside a file that ends
    properly shows only when it is decoded.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            if not length:
                return "empty file"
            file.seek(0)
            image = Image.open(file)
            if min(image.size) < SMALLEST_SIDE:
                return _too_small(*image.size)
            ending = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}.get(image.format or "")
            file.seek(max(0, length - 4096))
            if ending and ending not in file.read():
                file.seek(0)
                decode_image(file.read(), SMALLEST_SIDE, 3)
    except UnidentifiedImageError:
        return "not an image"
    except ImageDamagedError as error:
        return f"damaged: {error}"
    except DECODE_ERRORS as error:
        return f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
    return None


def photographs(size: int, channels: int) -> Pictures:
    """How photographs become samples: normalised as ImageNet is."""
    mean, deviation = MEAN, DEVIATION
    if channels == 1:
        mean, deviation = (float(np.mean(MEAN)),), (float(np.mean(DEVIATION)),)
    return Pictures(size=size, channels=channels, mean=mean, deviation=deviation)
