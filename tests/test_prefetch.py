"""Prefetch: when parameters are gathered, in which order, at what cost in memory, and that nothing else changes."""

from __future__ import annotations

import logging

import pytest
import torch
import training
from test_parallelize import CollectiveCounter
from test_parity import check
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel2d import MeshSpec, ParallelConfig, accumulate, build_mesh, build_on_meta, parallelize
from parallel2d.config import BucketingConfig, PrefetchConfig
from parallel2d.config.checks import validated
from parallel2d.cost.traffic import predict_communication
from parallel2d.errors import ConfigError
from parallel2d.metrics.communication import CommunicationMeter
from parallel2d.metrics.keys import COMMUNICATION_KEYS


class Reordered(nn.Module):
    """Four layers that run in another order than that of registration; ``skip`` leaves the second one out."""

    ORDER = (2, 0, 3, 1)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.skip = False

    def forward(self, x):
        for index in self.ORDER:
            if not (self.skip and index == self.ORDER[1]):
                x = torch.tanh(self.layers[index](x))
        return x


def _groups(model):
    """The engine's groups of the layers, by index."""
    return [layer._get_fsdp_state()._fsdp_param_groups[0] for layer in model.layers]


def _build(prefetch, strategy="zero3", **config):
    mesh = build_mesh(MeshSpec(), strategy)
    with build_on_meta():
        model = Reordered()
    config = ParallelConfig(
        strategy,
        BucketingConfig("block", policy=lambda module, _: isinstance(module, nn.Linear)),
        **config,
    )
    config.prefetch = PrefetchConfig(*prefetch)
    return parallelize(model, mesh, config, seed=0), mesh


def _issued(prefetch):
    """For each layer's compute in a step after the first: which layers' gathers had been issued by then, forward and backward."""
    model, _ = _build(prefetch)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    issued, seen = [], []
    for index, (layer, group) in enumerate(zip(model.layers, _groups(model), strict=True)):
        gather = group._all_gather_comm

        def note(*args, index=index, gather=gather, **kwargs):
            issued.append(index)
            return gather(*args, **kwargs)

        note.allocate = gather.allocate
        group._all_gather_comm = note
        layer.register_forward_hook(lambda *_, index=index: seen.append((index, tuple(issued))))
    output = model(x)
    forward = list(seen)
    issued.clear()
    backward = []
    for index, group in enumerate(_groups(model)):
        original = group.post_backward

        def ended(*args, index=index, original=original):
            if index not in [done for done, _ in backward]:
                backward.append((index, tuple(issued)))
            return original(*args)

        group.post_backward = ended
    output.sum().backward()
    return forward, backward


@pytest.mark.parametrize("ahead", [0, 1, 2, 99])
def test_gathers_are_issued_as_many_groups_ahead_as_asked_for(ranks, ahead):
    """``issued`` when a layer's compute ends: itself, all before it, and ``ahead`` more in the order in which layers run."""
    order = Reordered.ORDER
    for forward, backward in ranks.run(2, _issued, (ahead, ahead)):
        assert forward == [(index, order[: place + 1 + ahead]) for place, index in enumerate(order)]
        assert backward == [
            (index, order[::-1][: place + 1 + ahead]) for place, index in enumerate(order[::-1])
        ]


def _engine_default():
    model, _ = _build((0, 1))
    return [
        len(m._get_fsdp_state()._states_to_backward_prefetch)
        for m in model.modules()
        if isinstance(m, FSDPModule)
    ], _issued((0, 1))


def test_the_default_is_the_engines_own_one_group_ahead_in_backward(ranks):
    chains, (forward, backward) = ranks.run(2, _engine_default)[0]
    order = Reordered.ORDER
    assert set(chains) == {0}
    assert forward == [(index, order[: place + 1]) for place, index in enumerate(order)]
    assert backward == [
        (index, order[::-1][: place + 2]) for place, index in enumerate(order[::-1])
    ]


def _most_whole(prefetch):
    """Most layers whose parameters were whole, or on their way, at once while a layer ran forward, after the first step."""
    model, _ = _build(prefetch)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    most = 0

    def count(*_):
        nonlocal most
        most = max(
            most,
            sum(
                group.is_unsharded or group._all_gather_result is not None
                for group in _groups(model)
            ),
        )

    for layer in model.layers:
        layer.register_forward_hook(count, prepend=True)
    model(x)
    return most


def test_memory_grows_by_a_group_per_step_ahead(ranks):
    assert [ranks.run(2, _most_whole, (ahead, 1))[0] for ahead in (0, 1, 2, 9)] == [1, 2, 3, 4]


def _step(model, x):
    model(x).square().sum().backward()
    gradients = [training.whole(p.grad) for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return gradients


def _skipping(prefetch, grad_in_skipping):
    """Gradients of a step after one forward that left a layer out, and after weights changed in between."""
    model, _ = _build(prefetch)
    x = torch.ones(2, 4, requires_grad=True)
    _step(model, x)
    model.skip = True
    if grad_in_skipping:
        _step(model, x)
    else:
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.mul_(1.5)
    model.skip = False
    return _step(model, x)


@pytest.mark.parametrize("grad_in_skipping", [True, False])
def test_a_layer_that_is_left_out_once_is_current_afterwards(ranks, grad_in_skipping):
    """What was gathered for it in vain must not be used once weights have changed."""
    expected = ranks.run(2, _skipping, (0, 0), grad_in_skipping)[0]
    for prefetch in ((1, 1), (2, 2), (9, 9)):
        found = ranks.run(2, _skipping, prefetch, grad_in_skipping)[0]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), prefetch


class Twice(nn.Module):
    """One layer runs twice, with another in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        first, again, last = self.layers
        return last(torch.tanh(again(first(again(x)))))


def _twice(prefetch):
    with build_on_meta():
        model = Twice()
    config = ParallelConfig("zero3", "layer", prefetch=PrefetchConfig(*prefetch))
    model = parallelize(model, build_mesh(MeshSpec(), "zero3"), config, seed=0)
    x = torch.ones(2, 4, requires_grad=True)
    _step(model, x)
    with CollectiveCounter() as counter:
        gradients = _step(model, x)
    del counter.counts["reduce_scatter"]
    return gradients, counter.counts


def test_a_layer_that_runs_twice_is_gathered_no_more_often(ranks):
    expected, counts = ranks.run(2, _twice, (0, 1))[0]
    found, again = ranks.run(2, _twice, (2, 2))[0]
    assert again == counts
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _bytes(prefetch, accumulation, during, checkpointing, bucketing):
    """Measured bytes per axis of one global batch with a forward without gradients before it, and the prediction."""
    mesh = build_mesh(MeshSpec(), "hybrid")
    with build_on_meta():
        model = training.build_llama(n_layers=3)
    config = ParallelConfig(
        "hybrid",
        bucketing,
        activation_checkpointing=checkpointing,
        prefetch=PrefetchConfig(*prefetch),
    )
    model = parallelize(model, mesh, config, seed=0, init=model.init_weights)
    tokens, _ = training.global_batch(0)
    meter = CommunicationMeter(mesh).install()
    try:
        for _ in range(2):
            with torch.no_grad():
                model(tokens)
            meter.start()
            for _ in accumulate(model, range(accumulation), during):
                model(tokens).float().square().mean().backward()
            measured = dict(zip(COMMUNICATION_KEYS, meter.read(), strict=True))
    finally:
        meter.remove()
    predicted = predict_communication(
        model, mesh, accumulation=accumulation, during_accumulation=during
    )
    return {
        key: (measured[key], value) for key, value in predicted.items() if key.endswith("bytes")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "during", "checkpointing", "bucketing"), [
    (2, "reduce_scatter_only", "none", "layer"), (2, "none", "full", "block"), (2, "full", "full", "layer"),
])  # fmt: skip
def test_bytes_on_the_wire_do_not_depend_on_prefetch(
    ranks, accumulation, during, checkpointing, bucketing
):
    """With recomputation too, whose forwards would otherwise gather what backward has done with."""
    for prefetch in ((0, 1), (2, 2)):
        for key, (measured, predicted) in ranks.run(
            4, _bytes, prefetch, accumulation, during, checkpointing, bucketing
        )[0].items():
            assert measured == pytest.approx(predicted, rel=1e-9), (prefetch, key)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "tensor", "bucketing", "checkpointing", "accumulation"), [
    ("zero3", 1, "layer", "full", 2),
    ("hybrid", 2, "block", "none", 1),
    ("hybrid_zero2", 1, "size", "selective", 2),
    ("ddp", 1, "block", "none", 1),
])  # fmt: skip
def test_losses_equal_plain_pytorch_with_any_prefetch(
    ranks, strategy, tensor, bucketing, checkpointing, accumulation
):
    bucketing = BucketingConfig("size", 0.02) if bucketing == "size" else bucketing
    config = {
        "strategy": strategy,
        "bucketing": bucketing,
        "activation_checkpointing": checkpointing,
        "prefetch": PrefetchConfig(2, 3),
    }
    check(ranks, 4, {"tensor": tensor}, config, accumulation=accumulation)


def _asynchronous(enabled):
    """Gradients of two accumulated batches with a validation between, on a model whose gathers block or not."""
    model, _ = _build((1, 1), strategy="hybrid")
    if not enabled:
        model._set_unshard_async_op(False)
    x = torch.ones(2, 4, requires_grad=True)
    found = []
    for _ in range(2):
        for _ in accumulate(model, range(2)):
            model(x).square().sum().backward()
        found += [training.whole(p.grad) for p in model.parameters()]
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(model(x).detach())
        model.train()
    return found, _groups(model)[0].unshard_async_op


def test_asynchronous_gathers_change_no_bit(ranks):
    for (found, on), (expected, off) in zip(
        ranks.run(4, _asynchronous, True), ranks.run(4, _asynchronous, False), strict=True
    ):
        assert (on, off) == (True, False)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _said():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("parallel2d.parallelize.prefetch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _build((2, 1), strategy="ddp")
    _build((0, 1), strategy="ddp")
    logger.removeHandler(handler)
    return lines


def test_prefetch_without_a_shard_axis_is_said_to_have_no_effect(ranks):
    assert ranks.run(2, _said)[0] == [
        "prefetch has no effect with mesh.shard=1: no parameters are gathered"
    ]


def test_wrong_prefetch_is_refused():
    with pytest.raises(ConfigError, match=r"prefetch.forward=-1 must be at least 0"):
        validated(ParallelConfig(prefetch=PrefetchConfig(forward=-1)))
    with pytest.raises(ConfigError, match="prefetch must be PrefetchConfig, got str"):
        ParallelConfig(prefetch="auto")
