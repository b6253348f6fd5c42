"""Reads images from one folder per class: `find_images` lists them, `ImageSamples` decodes them.

At start only names and sizes of files are read. An image is decoded each time its position is read.

[Note: what an image becomes] Pillow decodes the image as it is stored: an orientation in its
metadata is not applied, transparency is dropped, and only the first frame of an animation is used.
It is converted to RGB or grey. The shorter side is resized to ``size`` with antialiased bilinear
interpolation, and the longer side is cut off equally at both ends, which leaves the square in the
middle, size x size. The values are float32 in [-1, 1]: (x / 255 - 0.5) / 0.5. There is no random
augmentation.
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

from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import labelled_images
from parallel2d.training.data.reading import HASH_RANGE, content_hash

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")
# The formats that are decoded, whatever the suffix of a file
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF")
_MODES = {1: "L", 3: "RGB"}
_MOST_PIXELS = 25_000_000  # the header of a small file may state any number


@dataclass(frozen=True)
class ImageFolder:
    """The images in a folder of classes. ``names`` are their paths below the folder, sorted;
    ``labels`` are their class ids, int64 [len(names)]."""

    path: str
    classes: tuple[str, ...]  # by class id
    names: list[str]
    labels: NDArray[np.int64]
    bytes: int
    others: int  # files without an image's suffix, or outside of the classes
    content: str  # hex digest of all names and sizes

    def split(self, validation_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the training images and of the held-out ones, both int64 and ascending.

        An image is held out if the hash of its path falls below the fraction. If there is none, the
        one with the lowest hash is held out. Adding or removing other images does not move an image
        to the other split. Raises `ConfigError` when no training image is left.
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
        """One line for the log. ``training`` is the number of training images."""
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

    Hidden files and folders are ignored. Files with other suffixes than `SUFFIXES`, files outside
    of the classes and links to folders inside a class are omitted and counted. Raises `ConfigError`
    for a path that is not a folder or cannot be read, a folder without classes and a class without
    images.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"data.path={path} is no folder; with data=images it is one whose subfolders are the "
            "classes"
        )
    try:
        found = sorted(_files(root))
        classes = _class_names(root)
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
    _check_classes(path, sorted(ids.keys() - {classes[label] for label in labels}))
    others = len(found) - len(names)
    return ImageFolder(
        path, classes, names, np.array(labels, dtype=np.int64), size, others, digest.hexdigest()
    )


def _class_names(root: Path) -> tuple[str, ...]:
    folders = [entry.name for entry in root.iterdir() if entry.is_dir()]
    return tuple(sorted(name for name in folders if not name.startswith(".")))


def _check_classes(path: str, empty: list[str]) -> None:
    if not empty:
        return
    listed = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    raise ConfigError(
        f"data.path={path}: no image ({', '.join(SUFFIXES)}) in {len(empty)} of its classes: "
        f"{listed}"
    )


def _files(folder: str | Path, prefix: str = "") -> Iterator[tuple[str, int | None]]:
    """Names below ``folder`` and sizes in bytes. The size is None for what is neither a file nor a
    folder, and for a link to a folder below the first level."""
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

    Raises `ConfigError` if Pillow is not installed.
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
        """Fills float32 [C, H, W] and int64 []. Raises `ConfigError` with the file's name if it
        cannot be decoded."""
        assert document_ids is None
        number = int(self._indices[index])
        try:
            pixels = self._decode(self._root / self._folder.names[number])
        except Exception as error:  # Pillow's decoders raise exceptions of many types
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
            # 16-bit grey keeps its upper eight bits, as Pillow does with 16-bit colour. Pillow's
            # own conversion would make nearly all of it white.
            if opened.mode.startswith("I"):
                image = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
            else:
                image = opened
            image = image.convert(self._mode)
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        # Only this is resized, so a long strip costs no more.
        square = (left, top, left + side, top + side)
        return np.asarray(image.resize((self._size, self._size), Image.Resampling.BILINEAR, square))
