"""A small folder of images per class, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from parallel2d.base.config import DataConfig
from parallel2d.training.data.opening import OpenData, open_data

try:
    from PIL import Image
except ImportError:  # tests that need it are marked `extras`
    Image = None  # type: ignore[assignment]

CLASSES, EACH = ("ant", "bee", "cat", "dog", "eel"), 12


def write_images(folder: Path, each: int = EACH, size: tuple[int, int] = (10, 12)) -> Path:
    """``each`` images of noise, no two alike, in each of five classes; a class has a colour that can be learned."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        (folder / name / "more").mkdir(parents=True)
        for index in range(each):
            pixels = (
                generator.integers(0, 128, (*size, 3))
                + np.array([number & 1, number & 2, number & 4]) * 30
            )
            where = folder / name / ("more" if index % 3 == 0 else "") / f"{index}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(where)
    return folder


def opened(folder: Path, seed: int = 0, **options: Any) -> OpenData:
    return open_data(
        DataConfig(name="images", path=str(folder), **{"image_size": 8, **options}), seed=seed
    )
