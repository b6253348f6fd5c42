"""A custom loop with `sync=diloco` that loses a replica at a named moment, and its reference in
one process.
"""

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sync_runs import SEED, adamw, batch_of, begins_of, cut_in_rows, loss_of, small_model
from training import weights_of

import parallel2d
from parallel2d.base.config import StrategyConfig, SyncConfig
from parallel2d.base.replicas import current
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.methods.diloco import ExpectedOuter, OuterSync

REPLICAS, STEPS_WITH_IT = 3, 9  # after the replica has rejoined


def die(victim: int) -> None:
    replicas = current()
    if (replicas.rank, replicas.incarnation) == (victim, 0):
        os.kill(os.getpid(), 9)


def train(folder: Path, sync: dict[str, Any], victim: int, step_of_loss: int, moment: str) -> None:
    """Each rank records the ranks that have computed a step, and the ranks that have shared the
    result.
    """
    parallel2d.setup(replicas=True)
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(replicate=REPLICAS, shard=1), "ddp")
    config = parallel2d.ParallelConfig("ddp", precision="fp64", sync=SyncConfig(**sync))
    model = parallel2d.parallelize(small_model(), mesh, config, seed=SEED)
    optimizer = adamw(parallel2d.updated_parameters(model))
    parallel2d.attach_optimizer(model, optimizer)
    replicas, members = parallel2d.Replicas(mesh, model, optimizer), current()
    begin = OuterSync._begin
    if moment == "send":

        def dying(self: OuterSync, fragment: Any) -> None:
            if self.steps == step_of_loss:
                die(victim)
            begin(self, fragment)

        OuterSync._begin = dying  # type: ignore[method-assign]
    notes = folder / f"{members.rank}.{members.incarnation}"
    last = 0
    for step in replicas.steps(1, 10**6):
        while replicas.compute():
            if (step, moment) == (step_of_loss, "forward"):
                die(victim)
            own = (each.chunk(replicas.data_ranks)[replicas.data_rank] for each in batch_of(step))
            loss_of(model, tuple(own)).backward()
        computed = list(members.members)
        optimizer.step()
        optimizer.zero_grad()
        with open(notes, "a") as file:
            file.write(json.dumps([step, computed, members.members]) + "\n")
        time.sleep(0.05)
        last += (victim, 1) in computed
        if last == STEPS_WITH_IT:
            break
    parallel2d.compare_replicas(model, mesh)
    with parallel2d.outer_parameters(model):
        torch.save([weights_of(model), begins_of(model)], folder / f"{members.rank}.pt")
    parallel2d.teardown()


def reference(sync: dict[str, Any], notes: list[Any], begins: dict[str, int]) -> dict[str, Any]:
    """Apply ``notes`` in one process: a failed replica is dropped, a rejoined replica starts from
    the outer parameters and the optimizer of the eldest replica.
    """
    first = dict(small_model().named_parameters())
    cuts = {name: cut_in_rows(value.shape, 1) for name, value in first.items()}
    method = method_of(StrategyConfig("ddp"), SyncConfig(**sync), REPLICAS)
    outer = ExpectedOuter(method, SEED, references := [], begins, cuts)
    outer.shared = {name: value.detach().clone() for name, value in first.items()}
    there: dict[tuple[int, int], Any] = {}

    def follow(members: list[tuple[int, int]]) -> None:
        for gone in there.keys() - set(members):
            del there[gone]
        eldest = next(iter(there.values()), None)
        for member in members:
            if member not in there:
                model = small_model()
                model.load_state_dict(outer.shared)
                optimizer = adamw(model.parameters())
                if eldest:
                    optimizer.load_state_dict(copy.deepcopy(eldest[1].state_dict()))
                there[member] = model, optimizer
        references[:] = [dict(model.named_parameters()) for model, _ in there.values()]

    for step, computed, shared in notes:
        members = [tuple(each) for each in computed]
        follow(members)
        for number, member in enumerate(sorted(members)):
            model, optimizer = there[member]
            own = (each.chunk(len(members))[number] for each in batch_of(step))
            loss_of(model, tuple(own)).backward()
            optimizer.step()
            optimizer.zero_grad()
        follow([tuple(each) for each in shared])
        outer.after_update(step)
    return {name: value.numpy() for name, value in outer.shared.items()}


if __name__ == "__main__":
    train(Path(sys.argv[1]), *json.loads(sys.argv[2]))
