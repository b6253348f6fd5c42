"""Scripts that write to, swap or misuse parameters of a parallelized model are right, or refused by name on every rank."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel2d import ConfigError, MeshSpec, ParallelConfig, build_mesh, parallelize

MESHES = {"hybrid": {"replicate": 2, "shard": 2}, "zero3": {}, "ddp": {}}
WIDTH = 4


class Block(nn.Module):
    """A layer. ``act`` is called in its forward with it."""

    act = staticmethod(lambda block: None)

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, x):
        extra = self.act(self)
        x = torch.tanh(self.up(x)) * self.frozen
        return x if extra is None else (x, extra)


class Stack(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks:
            block.act = act or Block.act

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            x = y if isinstance(y, torch.Tensor) else y[0] + x @ y[1]["w"][:WIDTH].T
        return self.head(x)


class Training:
    """A model on this rank, and steps of it. ``mesh`` None: in one process."""

    def __init__(self, mesh, strategy, act=None, prepare=None):
        self.rank = 0 if mesh is None else torch.distributed.get_rank()
        self.model = Stack(act)
        if prepare:
            prepare(self.model)
        if mesh is not None:
            self.model = parallelize(self.model, mesh, ParallelConfig(strategy, precision="fp64"))
        self.live = list(self.model.parameters())
        trained = [each for each in self.live if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.5)

    def forward(self):
        return self.model(_batch(self.rank)).square().sum()

    def step(self, count=1):
        for _ in range(count):
            self.forward().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self):
        with torch.no_grad():
            self.model(_batch(0))


def _batch(_rank):
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)


def _clamp(block):
    with torch.no_grad():
        block.up.weight.clamp_(-9, 9)


def _fill_a_row(block):
    block.up.weight.data[0].fill_(0.25)


def _move_frozen(block):
    block.frozen.data = 0.9 * block.frozen.data


def _stash(block):
    block.kept = {"views": [block.up.weight.detach()[:1]]}


def _stash_itself(block):
    block.last = block.up.bias


def _set_data(training):
    training.step()
    for each in training.live:
        each.data = 2 * each.data


def _call_with_others(training):
    # The third forward is not among those that are looked through.
    training.step(2)
    weights = {name: 0.9 * each for name, each in training.model.named_parameters()}
    torch.func.functional_call(training.model, weights, (_batch(0),))


def _add(training):
    training.step(5)
    training.model.register_parameter("temperature", nn.Parameter(torch.ones(WIDTH)))
    training.step()


def _replace_layer(training):
    training.model.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    training.step()


def _drop_bias(training):
    training.model.head.bias = None
    training.step()


def _number(training):
    training.step()
    # With `ddp` every rank has all of it.
    value = float(training.model.head.weight.norm())
    assert value == pytest.approx(training.model.head.weight.full_tensor().norm().item())


def _zero_a_row(training):
    training.model.head.weight.data[1].zero_()


def _assign_rows(training):
    training.forward().backward()
    training.live[-2].grad[:2] = 0


def _draw(training):
    training.model.head.reset_parameters()


def _values(training):
    training.model.head.bias.detach().numpy()


def _train_another(training):
    training.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    training.step()


class Writer(nn.Module):
    """Leaves its result in what it was given."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        entries = state if isinstance(state, dict) else vars(state)
        entries["x"] = self.up(entries["x"])


def _write_into(kind, _training):
    model = parallelize(Writer(), build_mesh(MeshSpec(), "zero3"), ParallelConfig(precision="fp64"))
    model(kind(x=_batch(0)))


def _see_same_memory(model):
    model.head.bias = nn.Parameter(model.head.weight.data[0])


def _hide(model):
    model.named_parameters = lambda *_, **__: model.blocks.named_parameters("blocks")


def _grad(training):
    torch.autograd.grad(training.forward(), training.live, allow_unused=True)


def _grad_of_gathered(training):
    loss = training.forward()
    parameters = [each for each in training.model.parameters() if each.requires_grad]
    torch.autograd.grad(loss, parameters)


def _backward_to_inputs(training):
    training.forward().backward(inputs=training.optimizer.param_groups[0]["params"])


def _update_between(training):
    late = training.forward()
    training.step()
    late.backward()


def _hold(where, model):
    block = model.blocks[0]
    weight = block.up.weight
    if where == "closure":
        block.project = lambda x: x @ weight
    elif where == "partial":
        block.project = functools.partial(nn.functional.linear, weight=weight)
    elif where == "default":
        block.project = lambda x, weight=weight: x @ weight
    elif where == "buffer":
        block.register_buffer("view", weight.data[:2])
    else:
        block.views = [weight.detach().t()]


def _share(model):
    other = Stack()
    other.head.weight = model.head.weight
    parallelize(other, build_mesh(MeshSpec(), "zero3"), ParallelConfig(precision="fp64"))


WRITTEN = "was written to while it was gathered"
MISPLACED = "is not the parameter that parallelize has sharded: torch.func.functional_call"
HELD = "blocks.0.{} holds {}blocks.0.up.weight in a plain"
REFUSED = {
    "clamp": (Training.step, {"act": _clamp}, f"blocks.0.up.weight {WRITTEN}"),
    "clamp without gradients": (Training.evaluate, {"act": _clamp}, f"blocks.0.up.weight {WRITTEN}"),
    # Rank 0 of each shard group alone sees it, and the agreement tells the others.
    "a row": (Training.step, {"act": _fill_a_row}, f"blocks.[01].up.weight {WRITTEN}"),
    "frozen": (Training.step, {"act": _move_frozen}, f"blocks.0.frozen {WRITTEN}"),
    "stash": (Training.step, {"act": _stash}, "blocks.[01].kept keeps blocks.[01].up.weight"),
    "stash a parameter": (Training.evaluate, {"act": _stash_itself}, "blocks.[01].last keeps blocks.[01].up.bias"),
    "data": (_set_data, {}, r".*\.data was set to another tensor"),
    "functional_call": (_call_with_others, {}, MISPLACED),
    "no bias": (_drop_bias, {}, f"head.bias {MISPLACED}"),
    "late": (_add, {}, "temperature was added or unfrozen after parallelize"),
    "layer": (_replace_layer, {}, "head.weight was added or unfrozen after parallelize"),
    "number": (_number, {}, "a number was asked of a DTensor"),
    "row of data": (_zero_a_row, {}, "aten.zero_.default writes to rows or columns of a DTensor"),
    "rows": (_assign_rows, {}, "aten.fill_.Tensor .* a DTensor: .*apply_full"),
    "random": (_draw, {}, "aten.uniform_.default would draw all parts of a DTensor alike"),
    "values": (_values, {}, r"numpy\(\) .* tensor.full_tensor\(\)"),
    "another": (_train_another, {}, r"SGD has a parameter of shape \(2, 2\) that is of no parallelized model"),
    "dict": (functools.partial(_write_into, dict), {}, "Writer changed a dict that it was given"),
    "object": (functools.partial(_write_into, SimpleNamespace), {}, "Writer changed a SimpleNamespace that"),
    "same memory": (Training.step, {"prepare": _see_same_memory}, "head.weight and head.bias are two parameters in the same"),
    "hidden": (Training.step, {"prepare": _hide}, r"Stack.named_parameters\(\) omits head.weight"),
    "grad": (_grad, {}, r"torch.autograd.grad\(\) with inputs=blocks.0"),
    "grad of gathered": (_grad_of_gathered, {}, r"torch.autograd.grad\(\) with inputs=blocks.0"),
    "backward": (_backward_to_inputs, {}, r"torch.autograd.backward\(\) with inputs=blocks.0"),
    "update": (_update_between, {}, "parameters of .* were changed between a forward and its backward.*optimizer.step"),
    "closure": (Training.step, {"prepare": functools.partial(_hold, "closure")}, HELD.format("project", "")),
    "partial": (Training.step, {"prepare": functools.partial(_hold, "partial")}, HELD.format("project", "")),
    "default": (Training.step, {"prepare": functools.partial(_hold, "default")}, HELD.format("project", "")),
    "buffer": (Training.step, {"prepare": functools.partial(_hold, "buffer")}, HELD.format("view", "the memory of ")),
    "view": (Training.step, {"prepare": functools.partial(_hold, "view")}, HELD.format("views", "the memory of ")),
    "two models": (Training.step, {"prepare": _share}, "head.weight is head.weight of another model"),
}  # fmt: skip


def _refusals(strategy):
    """What each case says on this rank; the package must have raised it."""
    mesh = build_mesh(MeshSpec(**MESHES[strategy]), strategy)
    told = {}
    for name, (act, settings, _) in REFUSED.items():
        told[name] = ""
        try:
            act(Training(mesh, strategy, **settings))
        except (RuntimeError, ConfigError) as error:
            told[name] = str(error)
    return told


def _build_after_evaluation(training):
    training.evaluate()
    training.live = list(training.model.parameters())
    training.optimizer = torch.optim.SGD(training.live, lr=0.5, foreach=True)
    average = [each.detach().clone() for each in training.live]
    training.step(2)
    for kept, each in zip(average, training.live, strict=True):
        kept.lerp_(each.detach(), 0.5)
    return average


def _clamp_after_evaluation(training):
    training.step()
    training.evaluate()
    for each in training.live:
        each.data.clamp_(-0.1, 0.1)
    training.step()


def _evaluate_before_update(training):
    training.optimizer = torch.optim.AdamW(training.live, lr=0.1, foreach=True)
    for _ in range(2):
        training.forward().backward()
        loss = training.forward()  # nobody calls its backward
        training.optimizer.step()
        training.optimizer.zero_grad()
    return [loss.detach()]


def _target_without_gradients(training):
    for _ in range(2):
        loss = training.forward()
        training.evaluate()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def _train_twice(training):
    training.step(2)


def _state_of_a_parameter(training):
    first = training.live[0]
    for make in (first.new_zeros, first.new_ones, first.new_empty):
        training.model(_batch(0) + make(2, WIDTH).fill_(0.5)).square().sum().backward()
    training.optimizer.step()


def _freeze_one_more(training):
    training.model.extra = nn.Linear(2, 2).requires_grad_(False)
    training.step(2)
    del training.model.extra


def _infer_first(training):
    with torch.inference_mode():
        training.model(_batch(0))
    training.step(2)
    return []


def _fail_in_backward(training):
    def fail(_gradient):
        raise RuntimeError("out of memory")

    hook = training.model.blocks[1].register_forward_hook(
        lambda *given: given[2].register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        training.forward().backward()
    hook.remove()
    training.optimizer.zero_grad()
    training.step(2)
    return []


def _name_group(model):
    model.head.weight.decays = False


def _skip_group(training):
    training.live = [each for each in training.model.parameters() if getattr(each, "decays", True)]
    training.optimizer = torch.optim.SGD(training.live, lr=0.5)
    training.step(2)
    return []


def _hand_out(which, block):
    weight = block.up.weight
    return {
        "w": {"itself": weight, "view": weight[:2].expand(2, WIDTH)}.get(which, weight.detach())
    }


def _keep_clone(block):
    block.kept = block.up.weight[:2].clone()


RIGHT = {
    "built after evaluation": (_build_after_evaluation, {}),
    "clamped after evaluation": (_clamp_after_evaluation, {}),
    "evaluated before update": (_evaluate_before_update, {}),
    "target without gradients": (_target_without_gradients, {}),
    "inference before training": (_infer_first, {}),
    "exception in backward": (_fail_in_backward, {}),
    "group by attribute": (_skip_group, {"prepare": _name_group}),
    "frozen added": (_freeze_one_more, {}),
    "state outside": (_state_of_a_parameter, {}),
    "state inside": (
        _train_twice,
        {"act": lambda block: {"w": next(block.parameters()).new_ones(WIDTH, WIDTH)}},
    ),
    "clone kept": (_train_twice, {"act": _keep_clone}),
    "weight returned": (_train_twice, {"act": functools.partial(_hand_out, "itself")}),
    "detached returned": (_train_twice, {"act": functools.partial(_hand_out, "detached")}),
}


def _results(strategy):
    """By case the whole parameters after it, and what else it returns."""
    mesh = build_mesh(MeshSpec(**MESHES[strategy]), strategy) if strategy else None
    found = {}
    for name, (act, settings) in RIGHT.items():
        training = Training(mesh, strategy, **settings)
        if mesh is None:
            training.model.double()
        more = act(training) or ()
        found[name] = [
            getattr(each, "full_tensor", lambda each=each: each)().detach().clone()
            for each in [*more, *training.model.parameters()]
        ]
    return found


@pytest.mark.parametrize(
    "strategy",
    ["hybrid", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero3", "ddp"))],
)
def test_misuse_of_parameters_is_right_or_refused_by_name(ranks, strategy):
    right = ("number", "row of data") if strategy == "ddp" else ()
    for told in ranks.run(4, _refusals, strategy):
        for name, (_, _, expected) in REFUSED.items():
            if name in right:
                assert not told[name]
                continue
            assert re.search(expected, told[name]), f"{name}: {told[name]!r}"
    alone = _results(None)
    for found in ranks.run(4, _results, strategy):
        for name, expected in alone.items():
            for ours, theirs in zip(found[name], expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), name
