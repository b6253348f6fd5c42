"""Train on a folder of images with one subfolder per class, as a custom data set of the train
command, with a model of `transformers` or with the small model below.

    PYTHONPATH=examples python -m parallel2d.train data=custom data.target=images:build \
        data.arguments.folder=PICTURES data.arguments.size=32 \
        'data.validation={held_out: {arguments: {folder: PICTURES, size: 32, held_out: true}}}' \
        model=hf model.architecture=vit model.arguments.image_size=32 model.arguments.num_labels=10

    ... model=custom model.target=images:Network model.arguments.classes=10

This needs Pillow (``pip install pillow``). Every read decodes an image, in ``data.workers`` threads
of each rank.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


def build(folder: str, size: int, held_out: bool = False, share: float = 0.02) -> ImageFolder:
    """Return the training images of a folder, or the held-out ``share``, for ``data.target``."""
    return ImageFolder(folder, size, held_out, share)


class ImageFolder:
    """Samples (float32 [3, size, size] in [-1, 1], number of the class). Classes are the subfolders
    in the order of their names. The held-out images depend only on their paths."""

    def __init__(self, folder: str, size: int, held_out: bool, share: float) -> None:
        root, self.size = Path(folder).expanduser(), size
        self.classes = sorted(each.name for each in root.iterdir() if each.is_dir())
        self.images: list[tuple[Path, int]] = []
        for number, name in enumerate(self.classes):
            for path in sorted((root / name).rglob("*")):
                relative = str(path.relative_to(root))
                is_held_out = zlib.crc32(relative.encode()) < share * 2**32
                if path.suffix.lower() in SUFFIXES and is_held_out == held_out:
                    self.images.append((path, number))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, number = self.images[index]
        with Image.open(path) as image:
            # The square in the middle
            side = min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
            whole = image.convert("RGB").resize((self.size, self.size), Image.BILINEAR, box)
        pixels = torch.from_numpy(np.array(whole)).permute(2, 0, 1)
        return (pixels / 255 - 0.5) / 0.5, number


class Network(nn.Module):
    """Three convolutions."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 2 * width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU())
            for before, after in pairwise(sizes)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, classes]."""
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))
