"""Images in one folder per class, as samples.

A folder flows in, rows of pixels and class ids flow out. At start only names and sizes of files are
read; an image is decoded when its position is, every time anew.

[Note: what an image becomes] Decoded by Pillow as it is stored (an orientation in its metadata is
not applied, transparency is dropped, of an animation the first frame counts), turned to RGB or
grey, and the square in its middle scaled to size x size: the shorter side is resized with
antialiased bilinear interpolation, what sticks out on both ends of the longer one is cut off. Then
float32 in [-1, 1], (x / 255 - 0.5) / 0.5. Nothing is random: there is no augmentation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d.data.batch import labelled_images
from parallel2d.data.documents import HASH_RANGE, content_hash
from parallel2d.errors import ConfigError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")
# decoders that a file may choose, whatever it is called
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF")
_MODES = {1: "L", 3: "RGB"}
_MOST_PIXELS = 25_000_000  # a small file may announce any number of them


@dataclass(frozen=True)
class ImageFolder:
    """What a folder of classes holds. ``names``: paths of the images below it, sorted; ``labels``:
    int64 [len(names)], class ids."""

    path: str
    classes: tuple[str, ...]  # by class id
    names: list[str]
    labels: NDArray[np.int64]
    bytes: int
    others: int  # files that are no images by their names, or belong to no class
    content: str  # hex digest of all names and sizes

    def split(self, validation_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the images that train, and of those that are held out: those whose path's hash
        falls below the fraction, or the one with the lowest when none does. Both int64, ascending.

        An image stays on its side whatever is added or removed beside it. Raises `ConfigError` when
        none is left to train on.
        """
        if not validation_fraction:
            return np.arange(len(self.names)), np.arange(0)
        hashes = np.array([content_hash(_bytes(name)) for name in self.names], dtype=np.uint64)
        held_out = hashes < np.uint64(int(validation_fraction * HASH_RANGE))
        held_out[hashes.argmin()] |= not held_out.any()
        if held_out.all():
            raise ConfigError(
                f"data.path={self.path}: all of its {len(self.names)} images are held out by "
                f"data.validation_fraction={validation_fraction}, which must be 0 here"
            )
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def describe(self, training: int, channels: int, size: int) -> str:
        """One line for people; ``training``: images that train."""
        shown = ", ".join(self.classes[:3]) + (", ..." if len(self.classes) > 3 else "")
        text = (
            f"images {self.path} {self.bytes / 1e6:,.1f} MB, {len(self.classes):,} classes "
            f"({shown})"
        )
        text += f", {training:,} training images of {channels} x {size} x {size}"
        return text + (f", {self.others:,} other files left out" if self.others else "")


def find_images(path: str) -> ImageFolder:
    """The classes of a folder, which are its subfolders in the order of their names, and the images
    in each at any depth.

    Hidden files and folders are passed over. Files with other suffixes than `SUFFIXES`, files
    beside the classes and links to folders inside a class are left out and counted. Raises
    `ConfigError` for a path that is no folder or cannot be read, a folder without classes and a
    class without images.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"data.path={path} is no folder; with data=images it is one whose subfolders are the "
            "classes"
        )
    try:
        found = sorted(_files(root))
        classes = tuple(
            sorted(
                entry.name
                for entry in root.iterdir()
                if entry.is_dir() and not entry.name.startswith(".")
            )
        )
    except OSError as error:
        raise ConfigError(
            f"data.path={path}: {error.filename} cannot be read: {error.strerror}"
        ) from None
    if not classes:
        raise ConfigError(
            f"data.path={path} has no subfolders: with data=images each class of images is one"
        )
    ids = {name: number for number, name in enumerate(classes)}
    digest, names, labels, size = hashlib.sha256(), [], [], 0
    for name, length in found:
        first, _, rest = name.partition("/")
        if length is None or not rest or not name.lower().endswith(SUFFIXES):
            continue
        names.append(name)
        labels.append(ids[first])
        size += length
        digest.update(json.dumps([name, length]).encode())
    if empty := sorted(set(classes) - {classes[label] for label in labels}):
        listed = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise ConfigError(
            f"data.path={path}: no image ({', '.join(SUFFIXES)}) in {len(empty)} of its classes: "
            f"{listed}"
        )
    others = len(found) - len(names)
    return ImageFolder(
        path, classes, names, np.array(labels, dtype=np.int64), size, others, digest.hexdigest()
    )


def _files(folder: str | Path, prefix: str = "") -> Iterator[tuple[str, int | None]]:
    """Names below ``folder`` and sizes in bytes; None: neither file nor folder, or a link to a
    folder below the first level."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=not prefix):
                yield from _files(entry.path, f"{name}/")
            else:
                yield name, entry.stat().st_size if entry.is_file() else None


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")  # a file name may be any bytes


class ImageSamples:
    """Sample i is image ``indices[i]`` of the folder: float32 [C, H, W] and its class id, int64 [];
    see [Note: what an image becomes].

    Raises `ConfigError` without Pillow.
    """

    def __init__(
        self, folder: ImageFolder, indices: NDArray[np.int64], channels: int, size: int
    ) -> None:
        try:
            from PIL import Image
        except ImportError as error:
            raise ConfigError(
                f'data=images needs Pillow: pip install "parallel2d[images]" ({error})'
            ) from None
        Image.init()  # registers the decoders here instead of in the first of several threads
        self._folder, self._indices, self._size = folder, indices, size
        self._root, self._mode = Path(folder.path).expanduser(), _MODES[channels]
        self.shape = labelled_images(channels, size)

    def __len__(self) -> int:
        return len(self._indices)

    def read(
        self,
        index: int,
        inputs: NDArray[Any],
        targets: NDArray[np.int64],
        document_ids: NDArray[np.int64] | None,
    ) -> None:
        """Fills float32 [C, H, W] and int64 []. Raises `ConfigError` that names a file which cannot
        be decoded."""
        assert document_ids is None
        number = int(self._indices[index])
        try:
            pixels = self._decode(self._root / self._folder.names[number])
        except Exception as error:  # Pillow's decoders raise whatever they stumble over
            raise ConfigError(
                f"data.path={self._folder.path}: {self._folder.names[number]} cannot be decoded as "
                f"an image ({type(error).__name__}: {error}); replace it, or take it out and start "
                "a new run"
            ) from None
        planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        np.divide(planes, 255, out=inputs, dtype=np.float32)
        inputs -= np.float32(0.5)
        inputs /= np.float32(0.5)
        targets[...] = self._folder.labels[number]

    def _decode(self, path: Path) -> NDArray[np.uint8]:
        """uint8 [H, W] or [H, W, 3]."""
        from PIL import Image

        with Image.open(path, formats=_FORMATS) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise ValueError(
                    f"{opened.width} x {opened.height} are more than {_MOST_PIXELS:,} pixels"
                )
            # Of 16-bit grey the upper eight, as Pillow does with 16-bit colour; its conversion
            # would make nearly all of it white
            deep = opened.mode.startswith("I")
            image = (
                Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)) if deep else opened
            ).convert(self._mode)
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        square = (left, top, left + side, top + side)  # scaled alone: a long strip costs no more
        return np.asarray(image.resize((self._size, self._size), Image.Resampling.BILINEAR, square))
