"""Names that docs/coming-from.md uses, and checks of the results of its Python cells: one check
per row, on every rank.
"""

import os
import re
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from test_parallelize import Block, CollectiveCounter
from test_parallelize import Nine as MyModel
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor
from training import full_tensor_of, is_agreement

import parallel2d
from parallel2d.base import config as config_module
from parallel2d.base.config import CheckpointConfig


class AllCollectives(CollectiveCounter):
    """Counts the functional collectives of DTensors too, and kinds that the engine does not use
    under their own names.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition("::")[2]
        counted = function.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor"
        if counted and not is_agreement(function, args):
            kind = (
                "allgather"
                if "all_gather" in name
                else next((kind for kind in self.KINDS if kind in name), name)
            )
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return function(*args, **(kwargs or {}))


def halve(module: nn.Module, _name: str) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            nn.init.constant_(parameter, 0.5)


def namespace(code: str) -> dict[str, Any]:
    """Return the names that the cell ``code`` uses and the document describes; ``x`` differs
    between data ranks.

    A model that receives loaded weights was changed before.
    """
    used = set(re.findall(r"\w+", code))
    names: dict[str, Any] = {name: getattr(parallel2d, name) for name in parallel2d.__all__}
    names |= {name: kind for name, kind in vars(config_module).items() if isinstance(kind, type)}
    torch.manual_seed(dist.get_rank() if "broadcast_from" in used else 0)
    mesh, config = (
        parallel2d.build_mesh(parallel2d.MeshSpec(2, 2), "hybrid"),
        parallel2d.ParallelConfig("hybrid"),
    )
    rank = dist.get_rank()
    module, bare = MyModel(), MyModel()
    # Tensor ranks share their data.
    x = (torch.arange(8).reshape(2, 4) + rank // (2 if "tensor=2" in code else 1)) % 8
    names |= {
        "torch": torch,
        "nn": nn,
        "MyModel": MyModel,
        "Block": Block,
        "module": module,
        "bare": bare,
        "mesh": mesh,
        "config": config,
        "bf16_compress_hook": default_hooks.bf16_compress_hook,
        "x": x,
        "micro_batches": [x, x],
        "rank": rank,
        "f": halve,
        "original": [p.detach().clone() for p in module.parameters()],
    }
    if not re.search(r"\b(model(?! = )|state|parts|whole)\b", code):
        return names
    torch.manual_seed(1)
    model = parallel2d.parallelize(MyModel(), mesh, config)
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    if used & {"optimizer", "state", "parts", "whole", "summon_full_params", "apply_full"}:
        one_step(names)
        names["before"] = snapshot(model, names["optimizer"])
    if "state" in used:
        names["state"] = parallel2d.full_state(model, names["optimizer"])
    if "whole" in used:
        names["whole"] = parallel2d.full_state(model, names["optimizer"], rank0_only=False)
    if "parts" in used:
        names["parts"] = parallel2d.sharded_state(model, names["optimizer"], copy=True)
    if "path" in used:
        # of all ranks of these workers
        names["path"] = os.path.join(tempfile.gettempdir(), f"parallel2d-test-{os.getppid()}")
        old = parallel2d.full_state(model, names["optimizer"]) if "torch" in used else {}
        if old:  # a full state of FSDP1: parameters and their optimizer state by name
            torch.save({"model": old["model"], "optim": old["optimizer"]}, names["path"])
    if used & {"load_full_state", "load_sharded_state"}:
        with torch.no_grad():
            moments = [entry["exp_avg"] for entry in names["optimizer"].state.values()]
            for tensor in [*model.parameters(), *moments]:
                tensor.mul_(2.0)
        assert snapshot(model, names["optimizer"]) != names["before"]
        names["optimizer"].param_groups[0]["lr"] = 0.7
    return names


def one_step(names: dict[str, Any]) -> None:
    names["model"](names["x"]).square().mean().backward()
    names["optimizer"].step()
    names["optimizer"].zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    tensors = [*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())]
    return [full_tensor_of(tensor).flatten().tolist() for tensor in tensors]


def run_cells(origin: str, cells: list[tuple[str, str]]) -> list[str]:
    """On a rank: runs each cell and the check of its row, if it has one; which rows had one."""
    checked = []
    for left, code in cells:
        names = namespace(code)
        with AllCollectives() as counter:
            exec(compile(code, left, "exec"), names)
        names["counts"] = counter.counts
        for other, begin, function in CHECKS:
            if other == origin and left.startswith(begin):
                function(names)
                checked.append(begin)
    return checked


def step_counts(names: dict[str, Any]) -> dict[str, int]:
    with CollectiveCounter() as counter:
        names["model"](names["x"]).sum().backward()
    return counter.counts


CHECKS: list[tuple[str, str, Any]] = []


def check(origin: str, *lefts: str):
    """Register a check for the rows of ``origin`` with a left cell that begins like one of
    ``lefts``.
    """

    def register(function):
        CHECKS.extend((origin, left, function) for left in lefts)
        return function

    return register


def counts(all_gathers: int, reduce_scatters: int, all_reduces: int):
    def function(names):
        expected = {
            "allgather": all_gathers,
            "reduce_scatter": reduce_scatters,
            "allreduce": all_reduces,
        }
        assert step_counts(names) == {kind: number for kind, number in expected.items() if number}

    return function


check("thunder", "fsdp(")(counts(5, 3, 0))
check("FullySharded", "auto_wrap_policy", "lambda_auto_wrap_policy")(counts(5, 3, 1))
check("fully_shard", "for block in", "reshard_after_forward=True")(counts(5, 3, 1))
check("fully_shard", "reshard_after_forward=False")(counts(3, 3, 1))


@check("thunder", "broadcast_from=0")
@check("FullySharded", "sync_module_states")
def all_have_the_weights_of_rank_0(names):
    torch.manual_seed(0)
    expected = MyModel()
    assert all(
        torch.equal(full_tensor_of(a), b)
        for a, b in zip(names["model"].parameters(), expected.parameters(), strict=True)
    )
    assert names["rank"] == 0 or not torch.equal(names["original"][0], expected.embedding.weight)


@check("thunder", "move_state_dict_to_cpu")
@check("FullySharded", "StateDictType.FULL_STATE_DICT")
@check("fully_shard", "get_model_state_dict")
def full_state_on_rank_0(names):
    if names["rank"]:
        assert names["state"] == {}
        return
    state = names["state"]["model"]
    assert state.keys() == MyModel().state_dict().keys()
    assert not any(
        isinstance(tensor, DTensor) or tensor.device.type != "cpu" for tensor in state.values()
    )
    assert names["counts"]["allgather"] >= len(state)


@check("thunder", "with model.no_sync")
def replicas_are_not_reduced(names):
    assert names["counts"].get("allreduce", 0) == 0
    assert names["counts"]["reduce_scatter"] == 3


@check("FullySharded", "with model.no_sync")
def nothing_is_reduced(names):
    assert names["counts"].keys() == {"allgather"}


@check("fully_shard", "model.set_requires_gradient_sync")
def nothing_is_reduced_before_the_last(names):
    assert (names["counts"]["reduce_scatter"], names["counts"]["allreduce"]) == (3, 1)


@check("FullySharded", "an accumulation loop")
@check("fully_shard", "model.set_requires_all_reduce")
def replicas_are_reduced_once(names):
    assert (names["counts"]["reduce_scatter"], names["counts"]["allreduce"]) == (6, 1)


@check("FullySharded", "model.load_state_dict(full)")
def weights_are_loaded(names):
    found = snapshot(names["model"], names["optimizer"])
    count = len(list(names["model"].parameters()))
    assert found[:count] == names["before"][:count]
    assert found[count:] != names["before"][count:]  # the cell does not use the optimizer


@check("FullySharded", "torch.save")
def an_old_file_is_loaded(names):
    if names["rank"] == 0:
        os.remove(names["path"])
    weights_and_optimizer_are_loaded(names)


@check("fully_shard", "dcp.save({")
def a_checkpoint_is_published(names):
    assert names["restored"] == {"step": 0, "samples": 0}
    names["model"].requires_grad_(False)
    before = snapshot(names["model"], names["optimizer"])
    for parameter in names["model"].parameters():
        parameter.zero_()
    again = parallel2d.Checkpointer(
        CheckpointConfig(), names["path"], names["mesh"], names["model"], names["optimizer"]
    )
    assert again.restore() == {"step": 1, "samples": 64}
    assert snapshot(names["model"], names["optimizer"]) == before
    dist.barrier()
    if names["rank"] == 0:
        shutil.rmtree(names["path"])


@check("FullySharded", "FSDP.scatter_full", "FSDP.flatten_sharded")
@check("fully_shard", "set_state_dict")
def weights_and_optimizer_are_loaded(names):
    assert snapshot(names["model"], names["optimizer"]) == names["before"]
    assert names["optimizer"].param_groups[0]["lr"] == 0.1


@check("fully_shard", "loss / dist")
def mean_over_all_tokens(names):
    logits = names["model"](names["x"]).flatten(0, 1)
    torch.testing.assert_close(
        names["loss"].float(), nn.functional.cross_entropy(logits, names["x"].flatten())
    )
