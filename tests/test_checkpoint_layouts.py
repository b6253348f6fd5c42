"""A checkpoint of any layout loads into any other, and the run goes on as if nothing had happened."""

from __future__ import annotations

import json
import os

import pytest
import torch
from checkpoint_runs import run

from parallel2d.checkpoint import Checkpoint

HYBRID = {"strategy": "hybrid"}
STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """fp64 losses of a run on hybrid 2x2 that never stopped, and the run dir of one that stopped at step
    4."""
    folder = str(tmp_path_factory.mktemp("source"))
    precise = dict(HYBRID, precision="fp64")
    whole = ranks.run(
        4, run, folder + "/whole", {"replicate": 2, "shard": 2}, precise, steps=STEPS
    )[0]
    ranks.run(4, run, folder + "/half", {"replicate": 2, "shard": 2}, precise, steps=4)
    return whole["losses"], folder + "/half/checkpoints/step-00000004"


LAYOUTS = {
    "one rank": (1, {}, {"strategy": "ddp"}),
    "zero3 x4": (4, {"shard": 4}, {"strategy": "zero3", "bucketing": "layer"}),
    "hybrid 2x1x2 with tensor": (4, {"replicate": 2, "shard": 1, "tensor": 2}, HYBRID),
    "hybrid 1x2x2 with tensor": (4, {"replicate": 1, "shard": 2, "tensor": 2}, HYBRID),
    "ddp x3": (3, {"replicate": 3}, {"strategy": "ddp", "bucketing": "size"}),
    "zero2 x3": (3, {"shard": 3}, {"strategy": "zero2"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_goes_on_as_if_nothing_had_happened_on_any_other_layout_and_back(
    ranks, uninterrupted, tmp_path, name
):
    expected, source = uninterrupted
    world, mesh, config = LAYOUTS[name]
    config = dict(config, precision="fp64")
    there = ranks.run(
        world, run, str(tmp_path), mesh, config, steps=6, checkpoint={"resume": source}
    )
    assert there[0]["restored"]["step"] == 4
    assert there[0]["restored"]["samples"] == 32
    back = ranks.run(
        4,
        run,
        str(tmp_path),
        {"replicate": 2, "shard": 2},
        dict(HYBRID, precision="fp64"),
        steps=STEPS,
    )
    assert back[0]["restored"]["step"] == 6
    for step, loss in {**there[0]["losses"], **back[0]["losses"]}.items():
        assert loss == pytest.approx(expected[step], abs=1e-10), f"step {step}"


@pytest.mark.soak
def test_eight_ranks_with_tensor_parallelism_go_on_from_four(ranks, uninterrupted, tmp_path):
    expected, source = uninterrupted
    mesh = {"replicate": 2, "shard": 2, "tensor": 2}
    config = dict(HYBRID, precision="fp64")
    there = ranks.run(8, run, str(tmp_path), mesh, config, steps=6, checkpoint={"resume": source})
    back = ranks.run(4, run, str(tmp_path), {"replicate": 2, "shard": 2}, config, steps=STEPS)
    for step, loss in {**there[0]["losses"], **back[0]["losses"]}.items():
        assert loss == pytest.approx(expected[step], abs=1e-10), f"step {step}"


def test_resume_on_the_same_layout_is_bitwise(ranks, tmp_path):
    mesh = {"replicate": 2, "shard": 2}
    whole = ranks.run(4, run, str(tmp_path / "whole"), mesh, HYBRID, steps=6)[0]["losses"]
    ranks.run(4, run, str(tmp_path / "half"), mesh, HYBRID, steps=3)
    rest = ranks.run(4, run, str(tmp_path / "half"), mesh, HYBRID, steps=6)[0]["losses"]
    assert rest == {step: whole[step] for step in (4, 5, 6)}


def test_a_save_right_after_validation_stores_the_same(ranks, tmp_path):
    """zero2 keeps parameters gathered after a forward without backward."""
    plain, validated = (
        ranks.run(
            2,
            run,
            str(tmp_path / name),
            {"shard": 2},
            {"strategy": "zero2"},
            steps=2,
            validate=name == "yes",
        )
        for name in ("no", "yes")
    )
    a, b = (
        Checkpoint.open(str(tmp_path / name / "checkpoints" / "step-00000002"))
        for name in ("no", "yes")
    )
    assert plain[0]["losses"] == validated[0]["losses"]
    assert a.tensors == b.tensors
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


def test_another_precision_loads_with_values_rounded_to_it(ranks, uninterrupted, tmp_path):
    expected, source = uninterrupted
    mesh = {"replicate": 1, "shard": 2}
    there = ranks.run(2, run, str(tmp_path), mesh, HYBRID, steps=6, checkpoint={"resume": source})[
        0
    ]
    for step, loss in there["losses"].items():
        assert loss == pytest.approx(expected[step], abs=1e-5)


@pytest.mark.parametrize(
    ("world", "mesh", "strategy"),
    [
        (4, {"replicate": 2, "shard": 2}, "hybrid"),
        (3, {"replicate": 3}, "ddp"),
        (2, {"tensor": 2}, "zero3"),
    ],
)
def test_nothing_is_written_twice_and_work_is_spread(
    ranks, tmp_path, monkeypatch, world, mesh, strategy
):
    result = ranks.run(world, run, str(tmp_path), mesh, {"strategy": strategy}, steps=1)[0]
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    parameters = sum(
        _numel(tensor["shape"])
        for name, tensor in manifest["tensors"].items()
        if name.startswith("model/")
    )
    state = 3 * 4 * parameters  # weights and two moments, fp32
    written = sum(os.path.getsize(folder / name) for name in os.listdir(folder))
    assert result["bytes_written"] == written
    tensors = sum(
        _numel(tensor["shape"])
        for name, tensor in manifest["tensors"].items()
        if "rng/" not in name
    )
    assert 4 * tensors <= state + 4 * 100  # the rest are the optimizer's step counts
    sizes = [file["bytes"] for file in manifest["files"].values()]
    assert len(sizes) == world
    assert max(sizes) < 1.35 * sum(sizes) / world
    assert sorted(os.listdir(folder)) == sorted([*manifest["files"], "manifest.json"])


def _numel(shape):
    result = 1
    for size in shape:
        result *= size
    return result
