"""`data=images` through the train command: every layout learns the same, and what cannot work is told before anything starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jobs
import pytest
import torch
import torch.nn.functional as F
from images import opened, write_images
from torch import nn
from workers import WorkerError

from parallel2d import launching
from parallel2d.base.config import DataConfig, HuggingFaceModel
from parallel2d.train import main
from parallel2d.training.model_families import build_model
from parallel2d.training.training_data import fit_images

pytestmark = pytest.mark.extras("PIL", "transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures")


SIZES = {
    "image_size": 8, "patch_size": 4, "num_labels": 5, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 16,
    "intermediate_size": 24,
}  # fmt: skip
VIT = [
    "model=hf",
    "model.architecture=vit",
    *(f"++model.arguments.{key}={value}" for key, value in SIZES.items()),
]
IMAGES = ["data=images", "data.path=pictures"]
PLAIN = ["optimizer=sgd", "optimizer.clip_norm=inf", "scheduler=constant"]


class Perceptron(nn.Module):
    """Somebody's own model: it says nothing of what it reads."""

    def __init__(self, inputs: int, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 5)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def _plain_losses(path: str, steps: int) -> list[float]:
    """The same job without any of our code in its loop: one process, the whole global batch, torch's loss and optimizer."""
    from parallel2d import build_on_meta
    from parallel2d.models import huggingface
    from parallel2d.parallel.model_structure import find_blocks
    from parallel2d.parallel.weights.initial_values import plan_weights

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


def test_a_vision_transformer_trains_alike_on_every_layout_and_after_a_stop(
    ranks, folder, tmp_path
):
    words = [*VIT, *IMAGES, *PLAIN]
    for name, world, more in [
        ("alone", 1, ["strategy=zero3"]),
        ("zero3", 4, ["strategy=zero3"]),
        ("hybrid", 4, ["strategy=hybrid", "train.micro_batch_size=2", "train.validate_every=3"]),
    ]:
        assert (
            ranks.run(world, jobs.run, str(tmp_path), str(tmp_path / name), [*words, *more], 6)[0]
            == 0
        )
    moved = str(tmp_path / "moved")
    # saved 2; step 3 is lost
    assert ranks.run(4, jobs.run, str(tmp_path), moved, [*words, "strategy=zero3"], 3)[0] == 0
    assert ranks.run(1, jobs.run, str(tmp_path), moved, words, 4)[0] == 2
    alone = jobs.rows(tmp_path / "alone")
    assert [row["loss"] for row in alone] == pytest.approx(
        _plain_losses(str(folder), 6), rel=1e-9, abs=0
    )
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
        "model=custom", "model.target=test_train_images:Perceptron", "++model.arguments.inputs=64", *IMAGES, "data.image_size=8",
        "data.channels=1", "checkpoint.enabled=false", *PLAIN,
    ]  # fmt: skip
    split = "model.tensor_plan={layers.1: colwise, layers.3: rowwise}"
    for name, world, more in [
        ("alone", 1, []),
        ("split", 4, ["mesh.tensor=2", split]),
        ("bf16", 4, ["precision=bf16"]),
    ]:
        ranks.run(world, jobs.run, str(tmp_path), str(tmp_path / name), [*custom, *more], 4)
    alone, other, rounded = (jobs.rows(tmp_path / name) for name in ("alone", "split", "bf16"))
    assert [row["loss"] for row in other] == pytest.approx(
        [row["loss"] for row in alone], rel=1e-10, abs=0
    )
    assert [row["loss"] for row in rounded] == pytest.approx(
        [row["loss"] for row in alone], rel=0.05
    )
    predicted = json.loads((tmp_path / "split" / "layout.json").read_text())["predicted"]
    assert predicted["comm/tensor/bytes"] == pytest.approx(other[-1]["comm/tensor/bytes"], rel=0.01)


def test_a_damaged_image_ends_the_job_with_its_name(ranks, folder, tmp_path):
    for path in (folder / "dog").glob("*.png"):
        path.write_bytes(b"damaged")
    words = [
        "model=custom",
        "model.target=test_train_images:Perceptron",
        "++model.arguments.inputs=192",
        *IMAGES,
        "data.image_size=8",
    ]
    with pytest.raises(
        WorkerError, match=r"data.path=pictures: dog/\d+.png cannot be decoded as an image"
    ):
        ranks.run(
            1,
            jobs.run,
            str(tmp_path),
            str(tmp_path / "run"),
            [*words, "checkpoint.enabled=false"],
            4,
        )


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """In the folder that holds ``pictures``, and where no worker may be started."""
    write_images(tmp_path / "pictures", each=3)
    monkeypatch.chdir(tmp_path)

    def never(*_args):
        raise AssertionError("workers were started")

    monkeypatch.setattr(launching, "start_workers", never)
    return tmp_path


OWN = ["model=custom", "model.target=test_train_images:Perceptron", "model.arguments.inputs=192"]
FEW = [*IMAGES, "train.global_batch_size=8", "launch.nproc_per_node=2"]
WRONG = [
    (["data=images"], ["data.path is required"]),
    ([*VIT, "data=images", "data.path=nowhere"], ["data.path=nowhere is no folder"]),
    ([*VIT, *IMAGES, "data.tokenizer=x"], ["data.tokenizer=x has no effect with data=images, only with stdlib, text, hf"]),
    ([*VIT, *IMAGES, "data.packing=padded"], ["data.packing=padded has no effect with data=images, only with stdlib"]),
    ([*VIT, *IMAGES, "data.intra_document_masking=true"], ["data.intra_document_masking=true has no effect with data=images"]),
    ([*VIT, *IMAGES, "train.seq_len=64"], ["train.seq_len=64 does not go with data=images: images have no length"]),
    (["data.image_size=8"], ["data.image_size=8 has no effect with data=stdlib, only with images"]),
    ([*VIT, *IMAGES, "data.image_size=0"], ["data.image_size=0 must be at least 1, or null"]),
    ([*VIT, *IMAGES, "data.channels=2"], ["data.channels=2 is not one of 1, 3, or null"]),
    ([*VIT], ["model.architecture=vit: ViTForImageClassification reads images, and data=stdlib gives token ids: set data=images"]),
    (IMAGES, ["model.family=llama: Llama reads tokens, and data=images gives images: set data=stdlib, text, tokens or hf"]),
    ([*OWN, *FEW], ["data.image_size is required: Perceptron names no image_size"]),
    ([*VIT, *FEW, "++model.arguments.num_labels=4"], ["model.arguments.num_labels=4 is smaller than the 5 classes of data.path=pictures"]),
    ([*VIT, *FEW, "data.image_size=16"], ["ViTForImageClassification does not read images of data.channels=3, data.image_size=16"]),
    ([*VIT, *FEW, "data.channels=1"], ["does not read images of data.channels=1, data.image_size=8"]),
    ([*VIT, *FEW, "++model.arguments.num_channels=4"], ["1 or 3 channels", "ViTForImageClassification reads 4"]),
    ([*VIT, *FEW, "train.global_batch_size=32"], ["train.global_batch_size=32 is more than the 14 training images of pictures"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"), WRONG, ids=[" ".join(words[-2:]) for words, _ in WRONG]
)
def test_wrong_words_are_one_clear_message(beside, words, expected, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("parallel2d: ")
    assert "Traceback" not in said
    assert all(word in said for word in expected), said


def test_a_model_of_any_size_takes_the_size_that_is_given() -> None:
    small = {"depths": [1, 1], "hidden_sizes": [8, 8], "num_stages": 2}
    parts = build_model(HuggingFaceModel(architecture="convnext", arguments=small))
    data = DataConfig(name="images", path="x")
    found = [fit_images(given, parts) for given in (data, dataclasses.replace(data, image_size=48))]
    assert [(fitted.image_size, fitted.channels) for fitted in found] == [(224, 3), (48, 3)]
