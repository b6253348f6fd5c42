"""`no_sync`: collectives of each axis inside and after it, gradients equal to `accumulate`, and no
gradients after an exception.
"""

import pytest
import torch
import training
from test_parallelize import CollectiveCounter

from parallel2d import accumulate, cross_entropy_sum, data_coordinate
from parallel2d.parallel.sync import no_sync

MICRO_BATCHES = 3


def reductions(counter):
    """(calls, elements of this rank's input) over the shard and over the replicate axis."""
    kinds = ("reduce_scatter", "allreduce")
    return [(counter.counts.get(kind, 0), counter.elements.get(kind, 0)) for kind in kinds]


def sharded():
    sizes, config = {"replicate": 2, "shard": 2}, {"strategy": "hybrid", "precision": "fp64"}
    mesh, model = training.sharded(sizes, config, n_layers=2, vocab_size=68)
    batches = [training.global_batch(step) for step in range(MICRO_BATCHES)]
    rank = data_coordinate(mesh)
    return model, [tuple(part.chunk(4)[rank] for part in batch) for batch in batches]


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
    with CollectiveCounter() as accumulated:
        for batch in accumulate(model, batches, mode):
            backward(model, batch)
    expected = take_gradients(model)
    with CollectiveCounter() as inside, no_sync(model, mode):
        for batch in batches[:-1]:
            backward(model, batch)
    with CollectiveCounter() as after:
        backward(model, batches[-1])
    equal = same(take_gradients(model), expected)
    with CollectiveCounter() as alone:
        backward(model, batches[0])
    expected = take_gradients(model)
    with no_sync(model, mode):
        backward(model, batches[1])
    model.zero_grad()
    backward(model, batches[0])
    equal = equal and same(take_gradients(model), expected)
    with CollectiveCounter() as by_setters:
        for index, batch in enumerate(batches):
            last = index == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(last or mode != "none")
            model.set_requires_all_reduce(last or mode == "full")
            model.set_is_last_backward(last or mode == "full")
            backward(model, batch)
    gradients = take_gradients(model)
    for batch in accumulate(model, batches, mode):
        backward(model, batch)
    equal = equal and same(gradients, take_gradients(model))
    equal = equal and reductions(by_setters) == reductions(accumulated)
    size = sum(parameter.numel() for parameter in model.parameters())
    counters = (accumulated, inside, after, alone)
    return [reductions(counter) for counter in counters], equal, size


GROUPS = 3  # two blocks and the root


@pytest.mark.parametrize(
    ("mode", "inside_shard", "inside_replicate"),
    [
        ("reduce_scatter_only", 2, 0),
        ("none", 0, 0),
        ("full", 2, 2),
    ],
)
def test_each_axis_sends_the_bytes_of_its_accumulation_mode(
    ranks, mode, inside_shard, inside_replicate
):
    """In addition, `zero_grad` drops the remainder of a micro-batch, and FSDP's own methods select
    the same axes.
    """
    for (accumulated, inside, after, alone), equal, size in ranks.run(4, _counted, mode):
        # of one micro-batch: reduce-scatter of everything, all-reduce of a shard in one bucket
        whole, part = (GROUPS, size), (1, size // 2)
        for found, last in ((inside, 0), (accumulated, 1)):
            assert found[0] == tuple((inside_shard + last) * n for n in whole)
            assert found[1] == tuple((inside_replicate + last) * n for n in part)
        assert after == alone == [whole, part]
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
    with CollectiveCounter() as after:
        backward(model, batches[0])
    calls = [calls for calls, _ in reductions(after)]
    return any(left), same(take_gradients(model), expected), calls


@pytest.mark.parametrize(
    ("mode", "during"),
    [
        ("reduce_scatter_only", "forward"),
        ("reduce_scatter_only", "accumulate"),
        ("none", "backward"),
        ("none", "accumulate"),
        ("full", "backward"),
    ],
)
def test_exception_in_no_sync_drops_its_micro_batches(ranks, mode, during):
    for left, equal, calls in ranks.run(4, _after_an_exception, mode, during):
        # there each micro-batch is reduced into .grad, which is the caller's to clear
        assert left == (mode == "full")
        assert equal
        assert calls == [GROUPS, 1]
