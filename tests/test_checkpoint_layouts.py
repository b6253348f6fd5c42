"""A checkpoint of any layout loads into any other layout, and the run continues with the same
losses.
"""

import json
import math
import os
import shutil

import pytest
import torch
from checkpoint_runs import run

from parallel2d.training.checkpoint import Checkpoint

STEPS = 8


PRECISE = {"strategy": "hybrid", "precision": "fp64"}
MESH = {"replicate": 2, "shard": 2}


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """fp64 losses of a run on hybrid 2x2 that never stopped, and the run dir of one that stopped
    at step 4.
    """
    folder = tmp_path_factory.mktemp("source")
    whole = ranks.run(4, run, str(folder / "whole"), MESH, PRECISE, steps=STEPS)[0]
    ranks.run(4, run, str(folder / "half"), MESH, PRECISE, steps=4)
    return whole["losses"], folder / "half"


CHAIN = [
    (4, {"shard": 4}, {"strategy": "zero3", "bucketing": "layer"}),
    (4, {"replicate": 1, "shard": 2, "tensor": 2}, {"strategy": "hybrid"}),
    (3, {"replicate": 3}, {"strategy": "ddp", "bucketing": "size"}),
    (1, {}, {"strategy": "ddp"}),
]


def test_resume_on_each_other_layout_continues_the_losses(ranks, uninterrupted, tmp_path):
    expected, source = uninterrupted
    shutil.copytree(source, tmp_path / "run")
    for step, (world, mesh, config) in enumerate(CHAIN, start=5):
        config = {**config, "precision": "fp64"}
        result = ranks.run(world, run, str(tmp_path / "run"), mesh, config, steps=step)[0]
        assert result["restored"] == {"step": step - 1, "samples": 8 * (step - 1)}
        assert result["losses"] == {step: pytest.approx(expected[step], abs=1e-10)}


def test_resume_on_the_same_layout_is_bitwise(ranks, uninterrupted, tmp_path):
    expected, source = uninterrupted
    shutil.copytree(source, tmp_path / "run")
    rest = ranks.run(4, run, str(tmp_path / "run"), MESH, PRECISE, steps=6)[0]["losses"]
    assert rest == {step: expected[step] for step in (5, 6)}


def test_save_after_validation_stores_training_weights(ranks, tmp_path):
    """zero2 keeps parameters gathered after a forward without backward."""
    layout, found = ({"shard": 2}, {"strategy": "zero2"}), []
    for name, validate in (("no", False), ("yes", True)):
        folder = tmp_path / name
        lives = ranks.run(2, run, str(folder), *layout, steps=2, validate=validate)
        stored = Checkpoint.open(str(folder / "checkpoints" / "step-00000002"))
        found.append((lives, stored))
    (plain, a), (validated, b) = found
    assert plain[0]["losses"] == validated[0]["losses"]
    assert a.tensors == b.tensors
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


def test_another_precision_loads_with_values_rounded_to_it(ranks, uninterrupted, tmp_path):
    expected, source = uninterrupted
    resume = {"resume": str(source / "checkpoints" / "step-00000004")}
    mesh, config = {"replicate": 1, "shard": 2}, {"strategy": "hybrid"}
    there = ranks.run(2, run, str(tmp_path), mesh, config, steps=6, checkpoint=resume)[0]
    for step, loss in there["losses"].items():
        assert loss == pytest.approx(expected[step], abs=1e-5)


@pytest.mark.parametrize(
    ("world", "mesh", "strategy"), [(4, MESH, "hybrid"), (3, {"replicate": 3}, "ddp")]
)
def test_each_shard_is_written_once_and_writes_are_balanced(ranks, tmp_path, world, mesh, strategy):
    result = ranks.run(world, run, str(tmp_path), mesh, {"strategy": strategy}, steps=1)[0]
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["step"], manifest["position"]) == (1, 1, 8)
    assert manifest["mesh"] == {"replicate": 1, "shard": 1, "tensor": 1} | mesh
    sizes = {name: math.prod(tensor["shape"]) for name, tensor in manifest["tensors"].items()}
    parameters = sum(size for name, size in sizes.items() if name.startswith("model/"))
    state = 3 * 4 * parameters  # weights and two moments, fp32
    assert result["bytes_written"] == sum(path.stat().st_size for path in folder.iterdir())
    # The rest are the optimizer's step counts.
    assert 4 * sum(size for name, size in sizes.items() if "rng/" not in name) <= state + 4 * 100
    written = [file["bytes"] for file in manifest["files"].values()]
    assert len(written) == world
    assert max(written) < 1.35 * sum(written) / world
    assert sorted(os.listdir(folder)) == sorted([*manifest["files"], "manifest.json"])


def plans():
    """Return the chunks that this rank writes of a replicated tensor of 64 MiB and of small
    tensors.
    """
    from parallel2d import MeshSpec, build_mesh
    from parallel2d.training.checkpoint.save import plan_writes

    mesh = build_mesh(MeshSpec(replicate=4), "ddp")
    large, small = torch.empty(8, 2**21), torch.empty(100)
    tensors = [("large", large), *((f"small {number}", small) for number in range(6))]
    return [
        (name, region.offsets[0], region.lengths[0])
        for name, _, region, _ in plan_writes(tensors, mesh)
    ]


def test_large_shard_is_split_into_chunks_of_16_mib(ranks):
    large = [("large", 2 * rank, 2) for rank in range(4)]
    found = ranks.run(4, plans)
    assert [plan[0] for plan in found] == large
    assert sorted(each for plan in found for each in plan[1:]) == [
        (f"small {number}", 0, 100) for number in range(6)
    ]
