"""Images in a folder per class: what stands at a position, what a model gets, and that every layout learns the same from it."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workers import WorkerError

from parallel2d import launch
from parallel2d.assemble import fit_images
from parallel2d.config import ConfigError, DataConfig, HuggingFaceModel
from parallel2d.data import IGNORED, BatchFeed, BatchPlan, OpenData, open_data
from parallel2d.data.batch import token_sequences
from parallel2d.data.images import SUFFIXES, find_images
from parallel2d.data.mixture import Schedule
from parallel2d.data.order import Order
from parallel2d.data.stream import SampleStream
from parallel2d.model import build_model
from parallel2d.train import main

Image = pytest.importorskip("PIL.Image")

CLASSES, EACH = ("ant", "bee", "cat", "dog", "eel"), 12


def write_images(folder: Path, each: int = EACH, size: tuple[int, int] = (10, 12)) -> Path:
    """``each`` images of noise, no two alike, in each of five classes; a class has a colour that can be learned."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        (folder / name / "more").mkdir(parents=True)
        for index in range(each):
            pixels = generator.integers(0, 128, (*size, 3)) + np.array([number & 1, number & 2, number & 4]) * 30
            where = folder / name / ("more" if index % 3 == 0 else "") / f"{index}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(where)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures")


def opened(folder: Path, seed: int = 0, **options: Any) -> OpenData:
    return open_data(DataConfig(name="images", path=str(folder), **{"image_size": 8, **options}), seed=seed)


def everything(stream: SampleStream) -> Any:
    return stream.read(range(len(stream)))


def one_image(folder: Path, pixels: np.ndarray, name: str = "x.png", mode: str | None = None, **options: Any) -> torch.Tensor:
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
    assert torch.equal(one_image(tmp_path / "same", pixels[:, :16], image_size=16), normalized(pixels[:, :16]))
    assert torch.equal(one_image(tmp_path / "cut", pixels, image_size=16), normalized(pixels[:, 4:20]))
    smaller = np.asarray(Image.fromarray(pixels).resize((12, 8), Image.Resampling.BILINEAR))[:, 2:10]
    assert torch.equal(one_image(tmp_path / "smaller", pixels), normalized(smaller))
    blurred = F.interpolate(torch.from_numpy(pixels[:, 4:20]).permute(2, 0, 1)[None].double(), 8, mode="bilinear", antialias=True)
    inside = one_image(tmp_path / "blurred", pixels)[:, :, 1:-1]  # at the border, pixels beside the square have their part
    assert ((inside + 1) * 127.5 - blurred[0][:, :, 1:-1]).abs().max() <= 1.01  # Pillow rounds after each of two passes
    tall = one_image(tmp_path / "tall", np.repeat(pixels[:, :1], 3, axis=1)[:, :3], image_size=64)
    assert tall.shape == (3, 64, 64)


def test_every_kind_of_file_becomes_what_the_model_reads(tmp_path: Path) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    wanted = normalized(grey[..., None])
    assert torch.equal(one_image(tmp_path / "grey", grey, channels=1), wanted)
    assert torch.equal(one_image(tmp_path / "three", grey), wanted.expand(3, 8, 8))
    assert torch.equal(one_image(tmp_path / "deep", grey.astype(np.uint16) * 256 + 99), wanted.expand(3, 8, 8))
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
    assert torch.equal(opened(renamed.parent, validation_fraction=0.0).train.read([0]).inputs[0], normalized(colour))


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
    assert sorted(batch.targets.tolist()) == sorted([0] + [number for number in range(1, 6) for _ in range(EACH)])
    red = torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1).expand(3, 8, 8)
    assert [target for image, target in zip(batch.inputs, batch.targets.tolist(), strict=True) if torch.equal(image, red)] == [0]


def test_a_class_may_be_a_link_and_a_folder_in_it_may_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "ant").symlink_to(folder / "ant")
    (tmp_path / "linked" / "bee").mkdir()
    (tmp_path / "linked" / "bee" / "0.png").symlink_to(folder / "bee" / "1.png")
    (tmp_path / "linked" / "bee" / "again").symlink_to(tmp_path / "linked")  # would never end
    found = find_images(str(tmp_path / "linked"))
    assert (len(found.names), found.others) == (EACH + 1, 1)


def test_the_order_depends_on_the_seed_alone_and_each_epoch_reads_all(folder: Path) -> None:
    first, again, other = opened(folder), opened(folder, workers=1), opened(folder, seed=1)
    size = len(first.train)
    batches = [data.train.read(range(2 * size)) for data in (first, again, other)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    assert batches[0].hash == batches[1].hash != batches[2].hash
    epochs = [sorted(map(bytes, half.numpy())) for batch in batches for half in batch.inputs.chunk(2)]
    assert all(epoch == epochs[0] for epoch in epochs)
    assert len(set(epochs[0])) == size
    assert not torch.equal(*batches[0].inputs.chunk(2))


def steps_of(data: OpenData, ranks: int, start: int = 0, steps: int = 5, **options: Any) -> list[tuple[int, list[bytes]]]:
    """Hash and sorted images of each global batch, over all ranks."""
    totals = [(0, [])] * steps
    for rank in range(ranks):
        plan = BatchPlan(global_batch_size=16, data_rank=rank, data_ranks=ranks, **{"micro_batch_size": "auto", **options})
        feed = BatchFeed(data.train, plan, "cpu", start=start)
        for step in range(steps):
            read = feed.next()
            images = [bytes(image.numpy()) for batch in read.micro_batches for image in batch.inputs]
            totals[step] = (totals[step][0] + read.sample_hash, sorted(totals[step][1] + images))
        feed.close()
    return totals


def test_global_batches_are_the_same_on_any_number_of_ranks_and_after_any_resume(folder: Path) -> None:
    data = opened(folder, seed=3)
    reference = steps_of(data, 1)
    assert len(data.train) < 5 * 16  # more than one epoch
    assert len({value for value, _ in reference}) == 5
    for ranks, options in ((2, {}), (4, {"micro_batch_size": 2}), (8, {"micro_batch_size": 1})):
        assert steps_of(data, ranks, **options) == reference
    assert steps_of(data, 4, start=48, steps=2) == reference[3:]
    padded = steps_of(data, 3, allow_padding=True)
    assert [value for value, _ in padded] == [value for value, _ in reference]


def test_the_hash_tells_pixels_classes_and_positions_apart(folder: Path) -> None:
    whole = opened(folder, validation_fraction=0.0).train
    seen = {everything(whole).hash, whole.read([0]).hash, whole.read([1]).hash, whole.read([len(whole)]).hash}
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


def test_a_missing_position_and_a_padded_end_have_weight_zero(folder: Path) -> None:
    stream = opened(folder, validation_fraction=0.0, epochs=1, end="pad").train
    batch = stream.read([None, 3, 60, 61])
    assert batch.targets.tolist()[0] == IGNORED
    assert batch.targets[2:].eq(IGNORED).all()
    assert batch.inputs[[0, 2, 3]].eq(0).all()
    assert (batch.valid_tokens, batch.hash) == (1, stream.read([3]).hash)
    assert [stream.ends_before(position, 16) for position in (48, 64)] == [False, True]
    assert opened(folder, validation_fraction=0.0, epochs=1).train.ends_before(48, 16)  # drop


def test_held_out_images_are_known_by_their_paths(folder: Path) -> None:
    data = opened(folder, validation_fraction=0.3)
    assert data.validation is not None
    assert len(data.train) + len(data.validation) == len(CLASSES) * EACH
    held_out = {bytes(image.numpy()) for image in everything(data.validation).inputs}
    assert held_out.isdisjoint(bytes(image.numpy()) for image in everything(data.train).inputs)
    assert torch.equal(
        everything(opened(folder, 7, validation_fraction=0.3).validation).inputs, everything(data.validation).inputs
    )
    assert opened(folder, validation_fraction=0.0).validation is None
    before = find_images(str(folder))
    chosen = {before.names[index] for index in before.split(0.3)[1]}
    for index in range(20):
        Image.new("RGB", (9, 9), (index, 0, 0)).save(folder / "cat" / f"new{index}.png")
    after = find_images(str(folder))
    assert {name for name in (after.names[index] for index in after.split(0.3)[1]) if "new" not in name} == chosen
    few = find_images(str(folder)).split(1e-9)
    assert len(few[1]) == 1


def test_the_fingerprint_names_everything_that_decides_what_is_read(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("content", [b"", b"no image", None, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_file_that_cannot_be_decoded_is_named_when_it_is_met(folder: Path, content: bytes | None, workers: int) -> None:
    path = folder / "cat" / "more" / "0.png"
    path.write_bytes(path.read_bytes()[:-60] if content is None else content)
    data = opened(folder, validation_fraction=0.0, workers=workers)
    feed = BatchFeed(data.train, BatchPlan(global_batch_size=60, micro_batch_size=60, data_rank=0, data_ranks=1), "cpu")
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"pictures: cat/more/0\.png cannot be decoded as an image \(\w+: .*replace it"):
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

        def read(self, index: int, inputs: np.ndarray, targets: np.ndarray, document_ids: None) -> None:
            self.meeting.wait()
            inputs[:], targets[:] = index, index

    stream = SampleStream([Slow()], Schedule([1]), seed=0, threads=2)
    expected = Order(8, 0, "train/0").index(np.arange(8))
    assert stream.read(range(8)).inputs[:, 0].tolist() == expected.tolist()


SIZES = {
    "image_size": 8, "patch_size": 4, "num_labels": 5, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 16,
    "intermediate_size": 24,
}  # fmt: skip
VIT = ["model=hf", "model.architecture=vit", *(f"++model.arguments.{key}={value}" for key, value in SIZES.items())]
IMAGES = ["data=images", "data.path=pictures"]
PLAIN = ["optimizer=sgd", "optimizer.clip_norm=inf", "scheduler=constant"]


class Perceptron(nn.Module):
    """Somebody's own model: it says nothing of what it reads."""

    def __init__(self, inputs: int, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def _plain_losses(path: str, steps: int) -> list[float]:
    """The same job without any of our code in its loop: one process, the whole global batch, torch's loss and optimizer."""
    from parallel2d import build_on_meta
    from parallel2d.models import huggingface
    from parallel2d.parallelize.initialization import plan_weights
    from parallel2d.parallelize.structure import find_blocks

    with build_on_meta():
        model = huggingface.build(architecture="vit", arguments=SIZES)
    plan_weights(model, find_blocks(model), None).write(model, 0, "cpu")
    model = model.double()
    stream = opened(Path(path)).train
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        batch = stream.read(range(16 * step, 16 * (step + 1)))
        loss = F.cross_entropy(model(batch.inputs.double()).logits, batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_vision_transformer_trains_alike_on_every_layout_and_after_a_stop(ranks, folder, tmp_path):
    pytest.importorskip("transformers")
    words = [*VIT, *IMAGES, *PLAIN]
    for name, world, more in [
        ("alone", 1, ["strategy=zero3"]),
        ("zero3", 4, ["strategy=zero3"]),
        ("hybrid", 4, ["strategy=hybrid", "train.micro_batch_size=2", "train.validate_every=3"]),
    ]:
        assert ranks.run(world, jobs.run, str(tmp_path), str(tmp_path / name), [*words, *more], 6)[0] == 0
    moved = str(tmp_path / "moved")
    assert ranks.run(4, jobs.run, str(tmp_path), moved, [*words, "strategy=zero3"], 3)[0] == 0  # saved 2; step 3 is lost
    assert ranks.run(1, jobs.run, str(tmp_path), moved, words, 4)[0] == 2
    alone = jobs.rows(tmp_path / "alone")
    assert [row["loss"] for row in alone] == pytest.approx(_plain_losses(str(folder), 6), rel=1e-9, abs=0)
    assert [row["tokens"] for row in alone] == [16 * step for step in range(1, 7)]
    for name in ("zero3", "hybrid", "moved"):
        for row, expected in zip(jobs.rows(tmp_path / name), alone, strict=True):
            assert row["data/batch_hash"] == expected["data/batch_hash"]
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-10, abs=0)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9, abs=0)
            assert row["tokens"] == expected["tokens"]
    assert sum("validation/loss" in row for row in jobs.rows(tmp_path / "hybrid")) == 2
    layout = (tmp_path / "hybrid" / "layout.json").read_text()
    assert '"classes"' in layout
    assert '"flops_per_sequence": null' not in layout


def test_a_custom_model_and_a_tensor_axis_read_images(ranks, folder, tmp_path):
    custom = [
        "model=custom", "model.target=test_data_images:Perceptron", "++model.arguments.inputs=64", *IMAGES, "data.image_size=8",
        "data.channels=1", "checkpoint.enabled=false", *PLAIN,
    ]  # fmt: skip
    split = "model.tensor_plan={layers.1: colwise, layers.3: rowwise}"
    for name, world, more in [("alone", 1, []), ("split", 4, ["mesh.tensor=2", split]), ("bf16", 4, ["precision=bf16"])]:
        ranks.run(world, jobs.run, str(tmp_path), str(tmp_path / name), [*custom, *more], 4)
    alone, other, rounded = (jobs.rows(tmp_path / name) for name in ("alone", "split", "bf16"))
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in alone], rel=1e-10, abs=0)
    assert [row["loss"] for row in rounded] == pytest.approx([row["loss"] for row in alone], rel=0.05)
    predicted = json.loads((tmp_path / "split" / "layout.json").read_text())["predicted"]
    assert predicted["comm/tensor/bytes"] == pytest.approx(other[-1]["comm/tensor/bytes"], rel=0.01)


def test_a_damaged_image_ends_the_job_with_its_name(ranks, folder, tmp_path):
    for path in (folder / "dog").glob("*.png"):
        path.write_bytes(b"damaged")
    words = [
        "model=custom",
        "model.target=test_data_images:Perceptron",
        "++model.arguments.inputs=192",
        *IMAGES,
        "data.image_size=8",
    ]
    with pytest.raises(WorkerError, match=r"data.path=pictures: dog/\d+.png cannot be decoded as an image"):
        ranks.run(1, jobs.run, str(tmp_path), str(tmp_path / "run"), [*words, "checkpoint.enabled=false"], 4)


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """In the folder that holds ``pictures``, and where no worker may be started."""
    write_images(tmp_path / "pictures", each=3)
    monkeypatch.chdir(tmp_path)

    def never(*_args):
        raise AssertionError("workers were started")

    monkeypatch.setattr(launch, "start_workers", never)
    return tmp_path


OWN = ["model=custom", "model.target=test_data_images:Perceptron", "model.arguments.inputs=192"]
FEW = [*IMAGES, "train.global_batch_size=8", "launch.nproc_per_node=2"]
WRONG = [
    (["data=images"], ["data.path is required"]),
    ([*VIT, "data=images", "data.path=nowhere"], ["data.path=nowhere is no folder"]),
    ([*VIT, *IMAGES, "data.tokenizer=x"], ["data.tokenizer=x has no effect with data=images, only with stdlib, text, hf"]),
    ([*VIT, *IMAGES, "data.packing=padded"], ["data.packing=padded has no effect with data=images, only with stdlib"]),
    ([*VIT, *IMAGES, "data.intra_document_masking=true"], ["data.intra_document_masking=True has no effect with data=images"]),
    ([*VIT, *IMAGES, "train.seq_len=64"], ["train.seq_len=64 has no effect with data=images"]),
    (["data.image_size=8"], ["data.image_size=8 has no effect with data=stdlib, only with images"]),
    ([*VIT, *IMAGES, "data.image_size=0"], ["data.image_size=0 must be at least 1, or null"]),
    ([*VIT, *IMAGES, "data.channels=2"], ["data.channels=2 must be 1 (grey) or 3 (RGB), or null"]),
    ([*VIT], ["model.architecture=vit: ViTForImageClassification reads images, and data=stdlib gives token ids: set data=images"]),
    (IMAGES, ["model.family=llama: Llama reads tokens, and data=images gives images: set data=stdlib, text, tokens or hf"]),
    ([*OWN, *FEW], ["data.image_size is required: Perceptron names no image_size"]),
    ([*VIT, *FEW, "++model.arguments.num_labels=4"], ["model.arguments.num_labels=4 is smaller than the 5 classes of data.path=pictures"]),
    ([*VIT, *FEW, "data.image_size=16"], ["ViTForImageClassification does not read images of data.channels=3, data.image_size=16"]),
    ([*VIT, *FEW, "data.channels=1"], ["does not read images of data.channels=1, data.image_size=8"]),
    ([*VIT, *FEW, "++model.arguments.num_channels=4"], ["1 or 3 channels", "ViTForImageClassification reads 4"]),
    ([*VIT, *FEW, "train.global_batch_size=32"], ["train.global_batch_size=32 is more than the 14 training images of pictures"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), WRONG, ids=[" ".join(words[-2:]) for words, _ in WRONG])
def test_wrong_words_are_one_clear_message(beside, words, expected, capsys):
    pytest.importorskip("transformers")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("parallel2d: ")
    assert "Traceback" not in said
    assert all(word in said for word in expected), said


def test_a_model_of_any_size_takes_the_size_that_is_given() -> None:
    pytest.importorskip("transformers")
    small = {"depths": [1, 1], "hidden_sizes": [8, 8], "num_stages": 2}
    parts = build_model(HuggingFaceModel(architecture="convnext", arguments=small))
    data = DataConfig(name="images", path="x")
    found = [fit_images(given, parts) for given in (data, dataclasses.replace(data, image_size=48))]
    assert [(fitted.image_size, fitted.channels) for fitted in found] == [(224, 3), (48, 3)]


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
    with pytest.raises(ConfigError, match=r"all of its 1 images are held out by data.validation_fraction=0.02, which must be 0"):
        opened(part)
    with pytest.raises(ConfigError, match="data.image_size is required with data=images"):
        opened(part, image_size=None)
    with pytest.raises(ConfigError, match="open_data needs seq_len"):
        open_data(DataConfig(), seed=0)


def test_a_missing_library_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r'data=images needs Pillow: pip install "parallel2d\[images\]"'):
        opened(folder)
