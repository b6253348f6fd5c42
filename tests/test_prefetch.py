"""Prefetch: time and order of all-gathers, their cost in memory, and unchanged results."""

import pytest
import torch
import training
from test_parallelize import CollectiveCounter
from torch import nn
from workers import logged

from parallel2d import MeshSpec, ParallelConfig, build_mesh, build_on_meta, parallelize
from parallel2d.base.config import BucketingConfig, PrefetchConfig
from parallel2d.base.errors import ConfigError


class Reordered(nn.Module):
    """Four layers that run in an order other than registration; ``skip`` omits the second layer."""

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
    return [layer._get_fsdp_state()._fsdp_param_groups[0] for layer in model.layers]


def _build(prefetch, strategy="zero3"):
    mesh = build_mesh(MeshSpec(), strategy)
    with build_on_meta():
        model = Reordered()
    bucketing = BucketingConfig("block", policy=lambda module, _: isinstance(module, nn.Linear))
    config = ParallelConfig(strategy, bucketing, prefetch=PrefetchConfig(*prefetch))
    return parallelize(model, mesh, config, seed=0)


def _issued(prefetch):
    """For each layer's compute in a step after the first: which layers' gathers had been issued by
    then, forward and backward; and how many layers were whole, or on their way, at once while a
    layer ran forward.
    """
    model = _build(prefetch)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    issued, seen, whole = [], [], []

    def ran(index):
        seen.append((index, tuple(issued)))
        found = [g.is_unsharded or g._all_gather_result is not None for g in _groups(model)]
        whole.append(sum(found))

    for index, (layer, group) in enumerate(zip(model.layers, _groups(model), strict=True)):
        gather = group._all_gather_comm

        def note(*args, index=index, gather=gather, **kwargs):
            issued.append(index)
            return gather(*args, **kwargs)

        note.allocate = gather.allocate
        group._all_gather_comm = note
        layer.register_forward_hook(lambda *_, index=index: ran(index), prepend=True)
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
    return forward, backward, max(whole)


@pytest.mark.parametrize(("ahead", "ahead_back"), [(0, 1), (0, 0), (1, 1), (2, 2), (99, 99)])
def test_all_gathers_are_issued_the_configured_number_of_groups_ahead(ranks, ahead, ahead_back):
    """When a layer's compute ends, the all-gathers of this layer, of all earlier layers and of the
    configured number of later layers have been issued, in the order of execution; only so many
    layers are unsharded at once. (0, 1), the default, is the engine's own.
    """
    order = Reordered.ORDER
    back = order[::-1]
    for forward, backward, most_whole in ranks.run(2, _issued, (ahead, ahead_back)):
        assert forward == [(index, order[: n + 1 + ahead]) for n, index in enumerate(order)]
        assert backward == [(index, back[: n + 1 + ahead_back]) for n, index in enumerate(back)]
        assert most_whole == min(1 + ahead, len(order))


def _step(model, x):
    model(x).square().sum().backward()
    gradients = [training.full_tensor_of(p.grad) for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return gradients


def _skipping(prefetch, grad_in_skipping):
    """Gradients of a step after one forward that left a layer out, and after weights changed in between."""
    model = _build(prefetch)
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
def test_skipped_layer_has_current_weights_in_the_next_step(ranks, grad_in_skipping):
    """The all-gather of a skipped layer must not be used once weights have changed."""
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


def test_layer_that_runs_twice_has_no_extra_all_gather(ranks):
    expected, counts = ranks.run(2, _twice, (0, 1))[0]
    found, again = ranks.run(2, _twice, (2, 2))[0]
    assert again == counts
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _said():
    with logged("parallel2d.parallel.parallelize.prefetch") as lines:
        model, _ = [_build((ahead, 1), strategy="ddp") for ahead in (2, 0)]
    stored = [each.to_local().data_ptr() for each in model.parameters()]
    model(torch.ones(2, 4))
    return lines, stored == [each.data_ptr() for each in model.parameters()]


def test_prefetch_without_a_shard_axis_is_reported_as_without_effect(ranks):
    said = "prefetch has no effect with mesh.shard=1: no parameters are gathered"
    assert ranks.run(2, _said)[0] == ([said], True)


def test_prefetch_that_is_not_a_number_is_refused():
    with pytest.raises(ConfigError, match="prefetch must be PrefetchConfig, got str"):
        ParallelConfig(prefetch="auto")
