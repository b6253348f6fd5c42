"""Policy of saves, kept checkpoints, and failures of saves and resumes."""

import copy
import itertools
import math
import os
import shutil
import socket
import threading
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Heard, run, steps_in
from safetensors.torch import load_file
from workers import WorkerError

import parallel2d
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.errors import ConfigError
from parallel2d.training.checkpoint import Checkpoint, Checkpointer, CheckpointError
from parallel2d.training.checkpoint import checkpointer as module
from parallel2d.training.checkpoint.storage import LocalStore

HYBRID = {"strategy": "hybrid"}
MESH = {"replicate": 1, "shard": 2}


class Small:
    """A single-process run without a mesh: a tiny model, AdamW, a checkpointer."""

    def __init__(self, run_dir, seed=0, model=None, optimizer=torch.optim.AdamW, **config):
        torch.manual_seed(seed)
        self.model = model or torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.step = 0
        self.checkpointer = Checkpointer(
            CheckpointConfig(**{"every": 1, **config}), run_dir, None, self.model, self.optimizer
        )

    def train(self, steps, **kwargs):
        for _ in range(steps):
            self.step += 1
            self.model(torch.randn(5, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.checkpointer.save_if_due(self.step, {"samples": 8 * self.step}, **kwargs)
        return self

    def restore(self):
        state = self.checkpointer.restore()
        self.step = state["step"] if state else 0
        return state

    def values(self):
        state = self.optimizer.state_dict()["state"]
        return [
            *self.model.state_dict().values(),
            *(state[i][key] for i in state for key in sorted(state[i])),
        ]


def same(small, values):
    for a, b in zip(small.values(), values, strict=True):
        assert torch.equal(a, b)


def complete(folder):
    return [int(name[5:]) for name in steps_in(folder) if name.startswith("step-")]


def test_param_group_settings_are_restored_on_request(tmp_path):
    """A custom loop needs the saved settings if its scheduler multiplies the current rate;
    otherwise the configuration applies.
    """
    first = Small(tmp_path)
    halving = torch.optim.lr_scheduler.ExponentialLR(first.optimizer, 0.5)
    for _ in range(3):
        first.train(1)
        halving.step()
    state = {"samples": 32, "scheduler": halving.state_dict()}
    first.checkpointer.save_if_due(4, state, last=True)
    first.checkpointer.finish()
    kept, taken = Small(tmp_path, seed=1), Small(tmp_path, seed=1)
    kept.restore()
    assert kept.optimizer.param_groups[0]["lr"] == 0.1
    going_on = torch.optim.lr_scheduler.ExponentialLR(taken.optimizer, 0.5)
    going_on.load_state_dict(taken.checkpointer.restore(settings=True)["scheduler"])
    group = taken.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["initial_lr"]) == (0.0125, (0.9, 0.999), 0.1)
    going_on.step()
    assert group["lr"] == 0.00625


def test_saved_state_and_random_generators_are_restored_bitwise(tmp_path):
    first = Small(tmp_path).train(3)
    first.checkpointer.finish()
    following = first.train(1).values()
    first.checkpointer.finish()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    second = Small(tmp_path, seed=99)
    assert second.restore() == {"step": 3, "samples": 24}
    stored = load_file(tmp_path / "checkpoints" / "step-00000003" / "rank-00000.safetensors")
    assert torch.equal(stored["model/0.weight"], second.model[0].weight)
    same(second.train(1), following)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 7]),
        ({"every": 3}, [3, 6, 7]),
        ({"every": 0}, [7]),
        ({"every": 5, "on_first_step": True}, [1, 5, 7]),
        ({"every": 0, "every_minutes": 1e-9}, [1, 2, 3, 4, 5, 6, 7]),
        ({"every": 1, "enabled": False}, []),
    ],
)
def test_saves_at_interval_and_end_and_keeps_configured_number(tmp_path, config, expected):
    small = Small(tmp_path, **{"keep_last": 0, **config}).train(6).train(1, last=True)
    small.checkpointer.finish()
    assert steps_in(tmp_path) == [f"step-{step:08d}" for step in expected], "no debris"


def test_preemption_waits_until_the_checkpoint_is_published(tmp_path):
    small = Small(tmp_path, every=0).train(2).train(1, preempted=True)
    assert (complete(tmp_path), small.checkpointer.age_steps) == ([3], 0)


def test_pending_save_is_awaited_and_stores_the_values_of_its_step(tmp_path, monkeypatch):
    write, release = module.write_checkpoint, threading.Event()

    def slow(*args):
        release.wait(timeout=30)
        return write(*args)

    monkeypatch.setattr(module, "write_checkpoint", slow)
    small = Small(tmp_path, every=2, keep_last=0).train(2)
    saved = [value.clone() for value in small.values()]
    small.train(1)
    assert complete(tmp_path) == [], "the loop did not wait for the disk"
    with Heard(lambda line: "still being written" in line and release.set()) as heard:
        small.train(1)
    small.checkpointer.finish()
    assert any("still being written" in line for line in heard)
    assert complete(tmp_path) == [2, 4]
    again = Small(tmp_path, seed=5, resume=str(tmp_path / "checkpoints" / "step-00000002"))
    again.restore()
    same(again, saved)


def test_auto_skips_damaged_checkpoints_and_names_each(tmp_path):
    Small(tmp_path, keep_last=0).train(4).checkpointer.finish()
    folder = tmp_path / "checkpoints"
    with open(folder / "step-00000004" / "rank-00000.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")
    os.unlink(folder / "step-00000003" / "manifest.json")
    small = Small(tmp_path, seed=1, keep_last=0)
    with Heard() as heard:
        assert small.restore()["step"] == 2
    text = "\n".join(heard)
    for said in (
        "skipping step-00000004",
        "SHA-256",
        "skipping step-00000003",
        "manifest.json is missing",
    ):
        assert said in text
    small.train(2).checkpointer.finish()
    aside = ["aside-step-00000003-1", "aside-step-00000004-1"]
    assert steps_in(tmp_path) == [*aside, *(f"step-{step:08d}" for step in (1, 2, 3, 4))]
    assert Small(tmp_path).restore()["step"] == 4


def test_damaged_checkpoint_of_the_same_step_is_moved_aside(tmp_path):
    small = Small(tmp_path).train(1)
    small.checkpointer.finish()
    (tmp_path / "checkpoints" / "step-00000002").mkdir()
    (tmp_path / "checkpoints" / "step-00000002" / "mine").write_text("kept")
    small.train(1).checkpointer.finish()
    assert complete(tmp_path) == [1, 2]
    assert os.listdir(tmp_path / "checkpoints" / "aside-step-00000002-1") == ["mine"]


def test_misnamed_step_is_skipped_and_error_lists_all_damaged_steps(tmp_path):
    Small(tmp_path).train(2).checkpointer.finish()
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "step-00000009")
    assert Small(tmp_path).restore()["step"] == 2
    for step in (1, 2):
        os.unlink(folder / f"step-{step:08d}" / "rank-00000.safetensors")
    with pytest.raises(ConfigError) as error:
        Small(tmp_path).restore()
    for said in ("step-00000001: ", "step-00000002: ", "resume=never"):
        assert said in str(error.value)


def test_resume_from_older_step_and_never_keep_existing_checkpoints(tmp_path):
    Small(tmp_path, keep_last=0).train(3).checkpointer.finish()
    again = Small(tmp_path, resume="never").checkpointer.restore(restarted=True)
    assert again["step"] == 3, "restarted workers go on whatever resume said"
    small = Small(tmp_path, resume=str(tmp_path / "checkpoints" / "step-00000001"))
    assert small.restore()["step"] == 1
    assert complete(tmp_path) == [1]
    small = Small(tmp_path, resume="never")
    assert small.restore() is None
    small.train(1).checkpointer.finish()
    aside = [f"aside-step-{step:08d}-1" for step in (1, 2, 3)]
    assert steps_in(tmp_path) == [*aside, "step-00000001"]


def test_checkpoint_of_another_run_is_loaded_once_and_missing_path_is_refused(tmp_path):
    Small(tmp_path / "a").train(3).checkpointer.finish()
    for resume in ("a", "a/checkpoints", "a/checkpoints/step-00000003"):
        small = Small(tmp_path / "b", seed=1, resume=str(tmp_path / resume))
        assert small.restore()["step"] == 3
    small.train(2).checkpointer.finish()
    again = Small(tmp_path / "b", resume=str(tmp_path / "a"))
    assert again.restore()["step"] == 5, "its own checkpoints come first"
    message = "^checkpoint.resume=.*this folder does not exist; use auto, never, or a path$"
    with pytest.raises(ConfigError, match=message):
        Small(tmp_path, resume=str(tmp_path / "nowhere")).restore()


def test_model_only_loads_weights_and_starts_at_step_zero(tmp_path):
    first = Small(tmp_path / "a").train(3)
    first.checkpointer.finish()
    options = {"resume": str(tmp_path / "a"), "load": "model_only"}
    small = Small(tmp_path / "b", seed=1, optimizer=torch.optim.SGD, **options)
    assert small.restore() is None
    for a, b in zip(small.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not small.optimizer.state_dict()["state"]


def other_model():
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False)
    )


def test_other_model_or_optimizer_is_refused_by_name_or_loaded_partially(tmp_path):
    first = Small(tmp_path).train(1)
    first.checkpointer.finish()
    small = Small(tmp_path, model=other_model())
    before = [value.clone() for value in small.values()]
    with pytest.raises(ConfigError) as error:
        small.restore()
    for said in (
        "0.weight: [5, 4] in the model, [3, 4] in the checkpoint",
        "0.bias: [5] in the model, [3] in the checkpoint",
        "2.bias: [2] in the checkpoint, not in the model",
        "checkpoint.strict=false",
    ):
        assert said in str(error.value)
    same(small, before)

    small = Small(tmp_path, model=other_model(), strict=False)
    with Heard() as heard:
        assert small.restore()["step"] == 1
    assert torch.equal(small.model[2].weight, first.model[2].weight)
    assert small.model[0].weight not in small.optimizer.state
    assert "0.weight: [5, 4] in the model" in "\n".join(heard)
    told = "(?s)optimizer Adam here, AdamW in the checkpoint.*checkpoint.load=model_only"
    with pytest.raises(ConfigError, match=told):
        Small(tmp_path, optimizer=torch.optim.Adam).restore()


def test_failed_saves_are_counted_leave_no_files_and_end_the_run_at_the_limit(
    tmp_path, monkeypatch
):
    small = Small(tmp_path, max_failures=3, asynchronous=False).train(1)
    write = LocalStore.write

    def full(self, place, name, blocks):
        write(self, place, name, [b"half a file"])
        raise OSError(28, "No space left on device", f"{place}/{name}")

    monkeypatch.setattr(LocalStore, "write", full)
    with Heard() as heard:
        small.train(2)
    assert small.checkpointer.failures == 2
    said = "could not be written: rank 0: No space left on device"
    assert sum(said in line for line in heard) == 2
    assert steps_in(tmp_path) == ["step-00000001"]
    monkeypatch.undo()
    small.train(1)
    assert small.checkpointer.failures == 0, "a success starts the count again"
    monkeypatch.setattr(LocalStore, "write", full)
    small.train(2)
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row.*checkpoint.max_failures=3"):
        small.train(1)
    assert complete(tmp_path) == [1, 4]


def test_a_failed_last_save_is_an_error_at_the_end(tmp_path, monkeypatch):
    small = Small(tmp_path)

    def denied(self, step, token):
        raise PermissionError(13, "Permission denied", self.root)

    monkeypatch.setattr(type(small.checkpointer.store), "begin", denied)
    small.train(1, last=True)
    with pytest.raises(CheckpointError):
        small.checkpointer.finish()


def fail_on_one_rank(folder):
    """Rank 1's disk is full for the first save: all ranks count the failure and continue."""
    write = LocalStore.write
    if dist.get_rank() == 1:

        def full(self, place, name, blocks):
            LocalStore.write = write
            raise OSError(28, "No space left on device")

        LocalStore.write = full
    try:
        return run(folder, MESH, HYBRID, steps=4, checkpoint={"every": 1, "keep_last": 0})
    finally:
        LocalStore.write = write


def test_a_fault_on_one_rank_is_a_failure_on_all(ranks, tmp_path):
    results = ranks.run(2, fail_on_one_rank, str(tmp_path))
    assert [result["published"] for result in results] == [[2, 3, 4], [2, 3, 4]]
    assert any("rank 1: No space left on device" in line for line in results[0]["log"])
    assert complete(tmp_path) == [2, 3, 4]


def blind_rank(folder):
    return run(f"{folder}/{dist.get_rank()}", MESH, HYBRID, steps=1)


def test_unshared_run_dir_is_refused_with_the_host(ranks, tmp_path):
    with pytest.raises(WorkerError) as error:
        ranks.run(2, blind_rank, str(tmp_path))
    assert error.value.kind == "ConfigError"
    assert "is not the same folder on every rank" in error.value.message
    assert socket.gethostname() in error.value.message


def test_checkpoint_of_the_previous_version_is_loaded(tmp_path):
    """Two ranks wrote it, each its part; the values count on from a hundred times the number of
    the tensor.
    """
    folder = Path(__file__).parent / "written_before" / "step-00000002"
    small = Small(tmp_path, resume=str(folder))
    note = "written by the version before"
    assert small.restore() == {"step": 2, "samples": 16, "note": note}
    numbers = itertools.count(1)
    for parameter in small.model.parameters():
        state = small.optimizer.state[parameter]
        for value in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            expected = torch.arange(value.numel()) + 100.0 * next(numbers)
            assert torch.equal(value.flatten(), expected)
        assert state["step"] == 2
    assert small.model[1].running_mean.tolist() == [0.5] * 3
    small.train(1).checkpointer.finish()


def two_matrices(tied):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
    if tied:
        model[1].weight = model[0].weight
    return model


def test_tied_weights_are_stored_once_and_load_untied(tmp_path):
    tied = Small(tmp_path, model=two_matrices(tied=True)).train(1)
    tied.checkpointer.finish()
    names = Checkpoint.open(str(tmp_path / "checkpoints" / "step-00000001")).tensors
    assert [name for name in names if name.startswith("model/")] == ["model/0.weight"]
    apart = Small(tmp_path, model=two_matrices(tied=False), load="model_only")
    apart.restore()
    assert torch.equal(apart.model[1].weight, tied.model[0].weight)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as LAMB does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("settings", [True, False])
def test_steps_counted_in_groups_and_settings_of_empty_groups_are_restored(tmp_path, settings):
    def build(lr, lr_of_empty):
        model = torch.nn.Linear(2, 2)
        groups = [{"params": model.parameters(), "lr": lr}, {"params": [], "lr": lr_of_empty}]
        optimizer = Counting(groups, lr=1.0)
        return Checkpointer(CheckpointConfig(every=1), tmp_path, None, model, optimizer)

    saved = build(0.1, 0.2)
    for _ in range(3):
        saved.model(torch.ones(1, 2)).sum().backward()
        saved.optimizer.step()
    saved.save_if_due(3, {})
    saved.finish()
    restored = build(8.0, 9.0)
    restored.restore(settings=settings)
    groups = restored.optimizer.param_groups
    assert groups[0]["step"] == 3
    assert [group["lr"] for group in groups] == ([0.1, 0.2] if settings else [8.0, 9.0])


@pytest.mark.parametrize("way", ["full state", "checkpoint", "whole matrices"])
def test_a_state_from_before_the_first_step_has_no_moments(tmp_path, way):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if way == "whole matrices":
        optimizer = parallel2d.whole_matrices(torch.optim.AdamW, model.parameters())
    checkpointer = Checkpointer(CheckpointConfig(every=1), tmp_path, None, model, optimizer)
    checkpointer.save_if_due(1, {})
    checkpointer.finish()
    state = parallel2d.full_state(model, optimizer)
    fresh = copy.deepcopy(optimizer.state_dict())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    match way:
        case "full state":
            parallel2d.load_full_state(model, optimizer, state)
        case "checkpoint":
            checkpointer.restore()
        case _:
            optimizer.load_state_dict(fresh)
    assert optimizer.state_dict()["state"] == {}


def test_saving_keeps_the_learning_rate_of_a_scheduler():
    model = torch.nn.Linear(2, 2)
    optimizer = parallel2d.whole_matrices(torch.optim.Adafactor, model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    parallel2d.full_state(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.05


class Kind(IntEnum):
    FIRST = 1


def test_user_state_dict_is_restored_as_saved(tmp_path):
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(CheckpointConfig(every=1), tmp_path, None, model, None)
    milestones = torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD(model.parameters()), [3, 3, 6]
    )
    state = {
        "scheduler": milestones.state_dict(),
        "pair": (1, [2]),
        "$tuple": math.inf,
        "best": {"loss": 1.5},
        "order": OrderedDict({2: "two", 1: "one"}),
    }
    expected = copy.deepcopy(state)
    checkpointer.save_if_due(1, state)
    state["pair"][1].append(3)
    checkpointer.finish()
    found = checkpointer.restore()
    assert found == {**expected, "step": 1}
    assert type(found["scheduler"]["milestones"]) is Counter
    assert type(found["order"]) is OrderedDict
    for lost in (torch.device("cpu"), defaultdict(int), Kind.FIRST, torch.Size([1])):
        refused = rf"state.nested\.lost is a {type(lost).__name__}: a checkpoint keeps"
        with pytest.raises(ConfigError, match=refused):
            checkpointer.save_if_due(2, {"nested": {"lost": lost}})
