"""Images in a folder per class: what stands at a position, what a model gets, and that every layout learns the same from it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from images import CLASSES, EACH, Image, opened, write_images

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import token_sequences
from parallel2d.training.data.feed import BatchFeed, BatchPlan
from parallel2d.training.data.images import SUFFIXES, find_images
from parallel2d.training.data.opening import open_data
from parallel2d.training.data.order import Order, Schedule
from parallel2d.training.data.stream import SampleStream

pytestmark = pytest.mark.extras("PIL")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures")


def everything(stream: SampleStream) -> Any:
    return stream.read(range(len(stream)))


def one_image(
    folder: Path, pixels: np.ndarray, name: str = "x.png", mode: str | None = None, **options: Any
) -> torch.Tensor:
    (folder / "only").mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(folder / "only" / name)
    data = opened(folder, validation_fraction=0.0, **options)
    assert len(data.train) == 1
    return data.train.read([0]).inputs[0]


def normalized(pixels: np.ndarray) -> torch.Tensor:
    """float32 [C, H, W] of uint8 [H, W, C], by torch."""
    return (torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(torch.float32) / 255 - 0.5) / 0.5


def test_a_batch_holds_images_and_one_class_each(folder: Path) -> None:
    data = opened(folder)
    batch = data.train.read(range(6))
    assert (batch.inputs.shape, batch.inputs.dtype) == ((6, 3, 8, 8), torch.float32)
    assert (batch.targets.shape, batch.targets.dtype) == ((6,), torch.int64)
    assert -1 <= batch.inputs.min() < batch.inputs.max() <= 1
    assert batch.valid_tokens == 6
    assert batch.document_ids is None
    assert data.classes == CLASSES
    assert data.vocab_size == 5
    assert data.description.startswith(
        f"images {folder} 0.0 MB, 5 classes (ant, bee, cat, ...), {len(data.train)} training images"
    )


def test_an_image_is_its_square_scaled_and_normalized(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    assert torch.equal(
        one_image(tmp_path / "same", pixels[:, :16], image_size=16), normalized(pixels[:, :16])
    )
    assert torch.equal(
        one_image(tmp_path / "cut", pixels, image_size=16), normalized(pixels[:, 4:20])
    )
    smaller = np.asarray(Image.fromarray(pixels).resize((12, 8), Image.Resampling.BILINEAR))
    assert torch.equal(one_image(tmp_path / "smaller", pixels), normalized(smaller[:, 2:10]))
    square = torch.from_numpy(pixels[:, 4:20]).permute(2, 0, 1)[None].double()
    blurred = F.interpolate(square, 8, mode="bilinear", antialias=True)[0][:, :, 1:-1]
    # at the border, pixels beside the square have their part
    inside = one_image(tmp_path / "blurred", pixels)[:, :, 1:-1]
    # Pillow rounds after each of two passes
    assert ((inside + 1) * 127.5 - blurred).abs().max() <= 1.01
    tall = one_image(tmp_path / "tall", np.repeat(pixels[:, :1], 3, axis=1)[:, :3], image_size=64)
    assert tall.shape == (3, 64, 64)


def test_every_kind_of_file_becomes_what_the_model_reads(tmp_path: Path) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    wanted = normalized(grey[..., None])
    assert torch.equal(one_image(tmp_path / "grey", grey, channels=1), wanted)
    assert torch.equal(one_image(tmp_path / "three", grey), wanted.expand(3, 8, 8))
    assert torch.equal(
        one_image(tmp_path / "deep", grey.astype(np.uint16) * 256 + 99), wanted.expand(3, 8, 8)
    )
    assert torch.equal(one_image(tmp_path / "one", np.stack([grey] * 3, -1), channels=1), wanted)
    colour = np.stack([grey, grey.T, grey[::-1]], -1)
    for suffix, mode, exact in [
        (".png", None, True), (".PNG", "RGBA", True), (".bmp", None, True), (".gif", "P", False), (".jpg", None, False),
        (".jpeg", "CMYK", False), (".webp", None, False),
    ]:  # fmt: skip
        found = one_image(tmp_path / f"of{suffix}", colour, f"x{suffix}", mode)
        assert found.shape == (3, 8, 8)
        assert torch.equal(found, normalized(colour)) or not exact
        assert (found - normalized(colour)).abs().mean() < 0.35, suffix
    renamed = tmp_path / "renamed" / "only"
    renamed.mkdir(parents=True)
    Image.fromarray(colour).save(renamed / "x.jpg", format="PNG")  # the content decides
    found = opened(renamed.parent, validation_fraction=0.0).train.read([0]).inputs[0]
    assert torch.equal(found, normalized(colour))


def test_classes_are_the_subfolders_in_the_order_of_their_names(folder: Path) -> None:
    (folder / "aardvark" / "a" / "b").mkdir(parents=True)
    Image.new("RGB", (8, 8), (255, 0, 0)).save(folder / "aardvark" / "a" / "b" / "red.png")
    (folder / ".hidden").mkdir()
    for hidden in (".hidden/x.png", "ant/.x.png", ".x"):
        (folder / hidden).write_bytes(b"")
    for other in ("notes.txt", "ant/list.csv", "loose.png"):
        (folder / other).write_bytes(b"")
    found = find_images(str(folder))
    assert found.classes == ("aardvark", *CLASSES)
    assert (len(found.names), found.others) == (len(CLASSES) * EACH + 1, 3)
    data = opened(folder, validation_fraction=0.0)
    assert data.description.endswith("3 other files left out")
    batch = everything(data.train)
    assert batch.targets.bincount().tolist() == [1] + [EACH] * 5
    red = torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1)
    assert batch.targets[(batch.inputs == red).flatten(1).all(1)].tolist() == [0]


def test_an_image_that_announces_too_many_pixels_is_not_decoded(folder: Path) -> None:
    image = next((folder / "ant").iterdir())
    # 25 million and some, in a few kilobytes
    Image.new("1", (5001, 5000)).save(image, format="PNG")
    with pytest.raises(ConfigError, match="5001 x 5000 are more than 25,000,000 pixels"):
        everything(opened(folder, validation_fraction=0.0).train)


def test_a_class_may_be_a_link_and_a_folder_in_it_may_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "ant").symlink_to(folder / "ant")
    (tmp_path / "linked" / "bee").mkdir()
    (tmp_path / "linked" / "bee" / "0.png").symlink_to(folder / "bee" / "1.png")
    (tmp_path / "linked" / "bee" / "again").symlink_to(tmp_path / "linked")  # would never end
    found = find_images(str(tmp_path / "linked"))
    assert (len(found.names), found.others) == (EACH + 1, 1)


def test_the_hash_tells_pixels_classes_and_positions_apart(folder: Path) -> None:
    whole = opened(folder, validation_fraction=0.0).train
    seen = {everything(whole).hash, *(whole.read([at]).hash for at in (0, 1, len(whole)))}
    path = folder / "ant" / "1.png"
    pixels = np.asarray(Image.open(path)).copy()
    pixels[5, 5, 0] ^= 1
    Image.fromarray(pixels).save(path)
    seen.add(everything(opened(folder, validation_fraction=0.0).train).hash)
    (folder / "ant").rename(folder / "ape")  # the same order of names, the same class ids
    same = everything(opened(folder, validation_fraction=0.0).train).hash
    (folder / "ape").rename(folder / "fly")
    seen.add(everything(opened(folder, validation_fraction=0.0).train).hash)
    assert same in seen
    assert len(seen) == 6


def held_out_names(folder: Path) -> set[str]:
    found = find_images(str(folder))
    return {found.names[index] for index in found.split(0.3)[1]}


def test_held_out_images_are_known_by_their_paths(folder: Path) -> None:
    data = opened(folder, validation_fraction=0.3)
    assert data.validation is not None
    assert len(data.train) + len(data.validation) == len(CLASSES) * EACH
    held_out = {bytes(image.numpy()) for image in everything(data.validation).inputs}
    assert held_out.isdisjoint(bytes(image.numpy()) for image in everything(data.train).inputs)
    other = opened(folder, 7, validation_fraction=0.3)
    assert torch.equal(everything(other.validation).inputs, everything(data.validation).inputs)
    assert opened(folder, validation_fraction=0.0).validation is None
    chosen = held_out_names(folder)
    for index in range(20):
        Image.new("RGB", (9, 9), (index, 0, 0)).save(folder / "cat" / f"new{index}.png")
    assert {name for name in held_out_names(folder) if "new" not in name} == chosen
    few = find_images(str(folder)).split(1e-9)
    assert len(few[1]) == 1


def test_the_fingerprint_names_everything_that_decides_what_is_read(
    folder: Path, tmp_path: Path
) -> None:
    reference = opened(folder).fingerprint
    assert opened(folder, workers=3, epochs=2).fingerprint == reference
    found = {
        opened(folder, seed=1).fingerprint,
        opened(folder, image_size=9).fingerprint,
        opened(folder, channels=1).fingerprint,
        opened(folder, validation_fraction=0.3).fingerprint,
    }
    moved = folder.rename(tmp_path / "elsewhere")
    assert opened(moved).fingerprint == reference
    (moved / "ant" / "1.png").rename(moved / "ant" / "99.png")
    found.add(opened(moved).fingerprint)
    (moved / "ant" / "99.png").rename(moved / "bee" / "99.png")
    found.add(opened(moved).fingerprint)
    with open(moved / "bee" / "99.png", "ab") as file:
        file.write(b"\0")
    found.add(opened(moved).fingerprint)
    assert len(found - {reference}) == 7


@pytest.mark.parametrize(
    "content", [b"", b"no image", None, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"]
)
@pytest.mark.parametrize("workers", [1, 4])
def test_a_file_that_cannot_be_decoded_is_named_when_it_is_met(
    folder: Path, content: bytes | None, workers: int
) -> None:
    path = folder / "cat" / "more" / "0.png"
    path.write_bytes(path.read_bytes()[:-60] if content is None else content)
    data = opened(folder, validation_fraction=0.0, workers=workers)
    plan = BatchPlan(global_batch_size=60, micro_batch_size=60, data_rank=0, data_ranks=1)
    feed = BatchFeed(data.train, plan, "cpu")
    message = r"pictures: cat/more/0\.png cannot be decoded as an image \(\w+: .*replace it"
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                feed.next()
    finally:
        feed.close()


def test_several_samples_are_read_at_once_and_stay_in_their_rows() -> None:
    class Slow:
        """Each read waits for another one."""

        shape = token_sequences(3)
        meeting = threading.Barrier(2, timeout=30)

        def __len__(self) -> int:
            return 8

        def read(
            self, index: int, inputs: np.ndarray, targets: np.ndarray, document_ids: None
        ) -> None:
            self.meeting.wait()
            inputs[:], targets[:] = index, index

    stream = SampleStream([Slow()], Schedule([1]), seed=0, threads=2)
    expected = Order(8, 0, "train/0").index(np.arange(8))
    assert stream.read(range(8)).inputs[:, 0].tolist() == expected.tolist()


def test_an_impossible_folder_is_one_clear_message(tmp_path: Path) -> None:
    empty, loose, part = tmp_path / "empty", tmp_path / "loose", tmp_path / "part"
    for folder in (empty, loose, part / "full", part / "void"):
        folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(loose / "x.png")
    Image.new("RGB", (8, 8)).save(part / "full" / "x.png")
    (part / "void" / "x.tiff").write_bytes(b"")
    for folder, message in [
        (empty, "has no subfolders: with data=images each class of images is one"),
        (loose, "has no subfolders"),
        (loose / "x.png", "is no folder"),
        (part, rf"no image \({', '.join(SUFFIXES)}\) in 1 of its classes: void"),
    ]:
        with pytest.raises(ConfigError, match=message):
            opened(folder)
    os.remove(part / "void" / "x.tiff")
    (part / "void").rmdir()
    with pytest.raises(
        ConfigError,
        match=r"all of its 1 images are held out by data.validation_fraction=0.02, which must be 0",
    ):
        opened(part)
    with pytest.raises(ConfigError, match="data.image_size is required with data=images"):
        opened(part, image_size=None)
    with pytest.raises(ConfigError, match="open_data needs seq_len"):
        open_data(DataConfig(), seed=0)


def test_a_missing_library_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(
        ConfigError, match=r'data=images needs Pillow: pip install "parallel2d\[images\]"'
    ):
        opened(folder)
