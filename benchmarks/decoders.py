"""Which JPEG decoder is fastest, and how far are its pixels from Pillow's?

Each candidate turns the bytes of a photograph into the 224x224 RGB picture that
training needs (decode, scale the shorter side, crop the centre). The files are
read into memory first, so that the disk is not part of the measurement. Rounds
of the candidates are interleaved, so that noise hits all alike; the median is
printed. Beside the clock stands the processor time per image, which other programs on
the machine disturb less. The pixel difference is the mean absolute difference to Pillow's full
decode with antialiased bilinear scaling, in steps of 0 to 255.

    python benchmarks/decoders.py FOLDER [--enlarge 4] [--threads 1,2] [--rounds 5] [--json]

`--enlarge N` first re-encodes every photograph N times larger, as from a camera.
Candidates whose package is not installed are left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIZE = 224
Decode = Callable[[bytes], np.ndarray]


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """The centred square, in the picture's own pixels."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def square_of(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    left, top, right, bottom = crop_box(width, height)
    return np.ascontiguousarray(pixels[top:bottom, left:right])


def scale_with_pillow(image: Image.Image) -> np.ndarray:
    resized = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=crop_box(*image.size))
    return np.asarray(resized)


def scale_with_torch(pixels: np.ndarray) -> np.ndarray:
    square = torch.from_numpy(square_of(pixels)).permute(2, 0, 1)[None]
    scaled = torch.nn.functional.interpolate(
        square, size=(SIZE, SIZE), mode="bilinear", antialias=True
    )
    return scaled[0].permute(1, 2, 0).contiguous().numpy()


def pillow_full(data: bytes) -> np.ndarray:
    return scale_with_pillow(Image.open(io.BytesIO(data)).convert("RGB"))


def open_draft(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (SIZE, SIZE))
    return image if image.mode == "RGB" else image.convert("RGB")


def pillow_draft(data: bytes) -> np.ndarray:
    return scale_with_pillow(open_draft(data))


def pillow_torch(data: bytes) -> np.ndarray:
    return scale_with_torch(np.array(open_draft(data)))


def candidates() -> tuple[dict[str, Decode], list[str]]:
    """The candidates that can run here, and the names of those that cannot."""
    found: dict[str, Decode] = {
        "pillow, full": pillow_full,
        "pillow, draft": pillow_draft,
        "pillow, draft + torch scaling": pillow_torch,
    }
    missing = []
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        def decode(data: bytes, **options: Any) -> np.ndarray:
            pixels = simplejpeg.decode_jpeg(data, min_height=SIZE, min_width=SIZE, **options)
            assert isinstance(pixels, np.ndarray)
            return pixels

        found["simplejpeg + pillow scaling"] = lambda data: scale_with_pillow(
            Image.fromarray(decode(data, min_factor=2))
        )
        found["simplejpeg + torch scaling"] = lambda data: scale_with_torch(
            decode(data, min_factor=2)
        )
        found["simplejpeg, scale by eighths + torch"] = lambda data: scale_with_torch(decode(data))
        found["simplejpeg, fast DCT + torch"] = lambda data: scale_with_torch(
            decode(data, min_factor=2, fastdct=True, fastupsample=True)
        )
    else:
        missing.append("simplejpeg")
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)

        def opencv(data: bytes) -> np.ndarray:
            width, height = Image.open(io.BytesIO(data)).size
            flags = cv2.IMREAD_COLOR_RGB
            for factor in (2, 4, 8):
                if min(width, height) >= factor * SIZE:
                    flags = getattr(cv2, f"IMREAD_REDUCED_COLOR_{factor}")
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
            if flags != cv2.IMREAD_COLOR_RGB:
                pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
            return pixels

        found["opencv, area scaling"] = lambda data: np.asarray(
            cv2.resize(square_of(opencv(data)), (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        )
        found["opencv + torch scaling"] = lambda data: scale_with_torch(opencv(data))
    else:
        missing.append("opencv-python-headless")
    try:
        from turbojpeg import TurboJPEG

        turbo = TurboJPEG()

        def pyturbojpeg(data: bytes) -> np.ndarray:
            return scale_with_pillow(Image.fromarray(turbo.decode(data, pixel_format=0)))

        found["PyTurboJPEG + pillow scaling"] = pyturbojpeg
    except (ImportError, RuntimeError):
        missing.append("PyTurboJPEG (package or its libturbojpeg)")
    return found, missing


def enlarged(data: bytes, factor: int) -> bytes:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    size = (image.width * factor, image.height * factor)
    out = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def images_per_second(decode: Decode, files: list[bytes], threads: int) -> tuple[float, float]:
    """Images per second by the clock, and milliseconds of processor time per image."""
    start, used = time.perf_counter(), time.process_time()
    if threads == 1:
        for data in files:
            decode(data)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(decode, files, chunksize=8):
                pass
    elapsed = time.perf_counter() - start
    return len(files) / elapsed, 1000 * (time.process_time() - used) / len(files)


def difference(decode: Decode, files: list[bytes]) -> float:
    """Mean absolute difference to `pillow_full`, over a few photographs."""
    gaps = [np.abs(decode(data).astype(int) - pillow_full(data)).mean() for data in files]
    return float(np.mean(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--enlarge", type=int, default=1)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    paths = sorted(arguments.folder.rglob("*.jpg"))
    step = max(1, len(paths) // arguments.limit)
    files = [path.read_bytes() for path in paths[::step]][: arguments.limit]
    if arguments.enlarge > 1:
        files = [enlarged(data, arguments.enlarge) for data in files]
    threads = [int(word) for word in arguments.threads.split(",")]
    found, missing = candidates()
    rates: dict[tuple[str, int], list[float]] = {}
    costs: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, decode in found.items():
            for count in threads:
                rate, cost = images_per_second(decode, files, count)
                rates.setdefault((name, count), []).append(rate)
                costs.setdefault((name, count), []).append(cost)

    rows: list[dict[str, Any]] = []
    for name, decode in found.items():
        row: dict[str, Any] = {"decoder": name}
        for count in threads:
            label = f"{count} thread{'s' * (count > 1)}"
            row[f"images/s, {label}"] = round(statistics.median(rates[name, count]))
            # Round by round, as the speed of a shared machine drifts between rounds.
            base = rates["pillow, draft", count]
            pairs = zip(rates[name, count], base, strict=True)
            ratio = statistics.median(rate / other for rate, other in pairs)
            row[f"x pillow draft, {label}"] = f"{ratio:.2f}"
            row[f"CPU ms, {label}"] = f"{statistics.median(costs[name, count]):.2f}"
        row["pixel difference"] = round(difference(decode, files[:100]), 2)
        rows.append(row)
    if arguments.json:
        print(json.dumps({"rows": rows, "missing": missing}))
        return
    print(f"{len(files)} photographs x{arguments.enlarge}, {sum(map(len, files)) / 1e6:.1f} MB,")
    print(f"{os.cpu_count()} cores, {platform.machine()}, median of {arguments.rounds} rounds\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if missing:
        print("\nNot installed here: " + ", ".join(missing))


if __name__ == "__main__":
    main()
