"""`no_sync`: what runs on which axis inside and after it, that it adds up as `accumulate` does, and what an exception leaves: nothing."""

from __future__ import annotations

import pytest
import torch
import training
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    accumulate,
    build_mesh,
    build_on_meta,
    cross_entropy_sum,
    data_coordinate,
    parallelize,
)
from parallel2d.parallel.sync import no_sync

MICRO_BATCHES = 3


class Reductions(TorchDispatchMode):
    """Reductions that reach the process groups: (calls, elements of this rank's input) of the shard and of the replicate axis."""

    def __init__(self):
        super().__init__()
        self.shard = self.replicate = (0, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            function.namespace == "c10d"
            and "reduce" in str(function)
            and not training.is_agreement(function, args)
        ):
            axis = "shard" if "reduce_scatter" in str(function) else "replicate"
            given = torch.utils._pytree.tree_leaves(args[1] if axis == "shard" else args[0])
            calls, elements = getattr(self, axis)
            size = sum(tensor.numel() for tensor in given if isinstance(tensor, torch.Tensor))
            setattr(self, axis, (calls + 1, elements + size))
        return function(*args, **(kwargs or {}))


def sharded():
    """A model on 2 replicas of 2 shards, and this rank's micro-batches."""
    mesh = build_mesh(MeshSpec(replicate=2, shard=2), "hybrid")
    with build_on_meta():
        model = training.build_llama(n_layers=2, vocab_size=68)
    model = parallelize(
        model, mesh, ParallelConfig("hybrid", precision="fp64"), seed=0, init=model.init_weights
    )
    batches = [training.global_batch(step) for step in range(MICRO_BATCHES)]
    return model, [
        tuple(part.chunk(4)[data_coordinate(mesh)] for part in batch) for batch in batches
    ]


def backward(model, batch):
    cross_entropy_sum(model(batch[0]), batch[1]).backward()


def take_gradients(model):
    found = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _counted(mode):
    model, batches = sharded()
    for batch in accumulate(model, batches, mode):
        backward(model, batch)
    expected = take_gradients(model)
    with Reductions() as inside, no_sync(model, mode):
        for batch in batches[:-1]:
            backward(model, batch)
    with Reductions() as after:
        backward(model, batches[-1])
    equal = same(take_gradients(model), expected)
    with Reductions() as alone:
        backward(model, batches[0])
    take_gradients(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    return [(count.shard, count.replicate) for count in (inside, after, alone)], equal, size


GROUPS = 3  # two blocks and the root


@pytest.mark.parametrize(("mode", "inside_shard", "inside_replicate"), [
    ("reduce_scatter_only", 2, 0),
    ("none", 0, 0),
    ("full", 2, 2),
])  # fmt: skip
def test_each_axis_moves_what_the_mode_says_and_the_sum_is_that_of_accumulate(
    ranks, mode, inside_shard, inside_replicate
):
    for (inside, after, alone), equal, size in ranks.run(4, _counted, mode):
        # of one micro-batch: reduce-scatter of everything, all-reduce of a shard in one bucket
        whole, part = (
            (GROUPS, size),
            (1, size // 2),
        )
        assert inside == (
            tuple(inside_shard * n for n in whole),
            tuple(inside_replicate * n for n in part),
        )
        assert after == alone == (whole, part)
        assert equal


def _after_an_exception(mode, during):
    model, batches = sharded()
    backward(model, batches[0])
    expected = take_gradients(model)

    def fail(_gradient):
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        if during == "accumulate":
            for batch in accumulate(model, batches, mode):
                backward(model, batch)
                if batch is batches[1]:
                    fail(None)
        with no_sync(model, mode):
            backward(model, batches[1])
            if during == "forward":
                fail(None)
            logits = model(batches[2][0])
            logits.register_hook(fail)
            cross_entropy_sum(logits, batches[2][1]).backward()
    left = [parameter.grad is not None for parameter in model.parameters()]
    model.zero_grad()
    with Reductions() as after:
        backward(model, batches[0])
    return any(left), same(take_gradients(model), expected), (after.shard[0], after.replicate[0])


@pytest.mark.parametrize("during", ["forward", "backward", "accumulate"])
@pytest.mark.parametrize("mode", ["reduce_scatter_only", "none", "full"])
def test_an_exception_inside_leaves_nothing_of_the_lost_micro_batches(ranks, mode, during):
    for left, equal, calls in ranks.run(4, _after_an_exception, mode, during):
        # there each micro-batch is reduced into .grad, which is the caller's to clear
        assert left == (mode == "full")
        assert equal
        assert calls == (GROUPS, 1)
