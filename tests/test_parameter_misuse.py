"""Scripts that write to, swap or misuse parameters of a parallelized model are correct, or refused
by name on every rank.
"""

import copy
import functools
import re
from collections import defaultdict
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
        self.model = Stack(act)
        if prepare:
            prepare(self.model)
        if mesh is not None:
            self.model = parallelize(self.model, mesh, ParallelConfig(strategy, precision="fp64"))
        self.live = list(self.model.parameters())
        trained = [each for each in self.live if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.5)

    def forward(self):
        return self.model(_batch()).square().sum()

    def step(self, count=1):
        for _ in range(count):
            self.forward().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self):
        with torch.no_grad():
            self.model(_batch())


def _batch():
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


class Writer(nn.Module):
    """Write the result into the input."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        entries = state if isinstance(state, dict) else vars(state)
        entries["x"] = self.up(entries["x"])


def _write_into(kind, _training):
    model = parallelize(Writer(), build_mesh(MeshSpec(), "zero3"), ParallelConfig(precision="fp64"))
    model(kind(x=_batch()))


class Named(dict):
    pass


def _defaultdict(x):
    return defaultdict(list, x=x.requires_grad_())


def _see_same_memory(model):
    model.head.bias = nn.Parameter(model.head.weight.data[0])


def _hide(model):
    model.named_parameters = lambda *_, **__: model.blocks.named_parameters("blocks")


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


KEPT = []  # outside of modules, whose attributes are checked


def _keep_rows(linear, *_):
    KEPT.append(linear.weight.detach()[1:])


class Misuse(Training):
    """Misuse in scripts that is refused."""

    def set_data(self):
        self.step()
        for each in self.live:
            each.data = 2 * each.data

    def call_with_others(self):
        self.step()
        weights = {name: 0.9 * each for name, each in self.model.named_parameters()}
        torch.func.functional_call(self.model, weights, (_batch(),))

    def add(self):
        self.step()
        self.model.register_parameter("temperature", nn.Parameter(torch.ones(WIDTH)))
        self.step()

    def replace_layer(self):
        self.model.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.step()

    def drop_bias(self):
        self.model.head.bias = None
        self.step()

    def number(self):
        self.step()
        # With `ddp` every rank has the full parameter.
        value = float(self.model.head.weight.norm())
        assert value == pytest.approx(self.model.head.weight.full_tensor().norm().item())

    def zero_a_row(self):
        self.model.head.weight.data[1].zero_()

    def rectify_rows(self):
        nn.functional.relu(self.model.head.weight[:1], inplace=True)

    def write_to_data_of_rows(self):
        self.model.head.weight[:1].data.add_(1)

    def add_plain_rows(self):
        self.model.head.weight.data.index_add_(0, torch.tensor([0]), torch.ones(1, WIDTH).double())

    def assign_rows(self):
        self.forward().backward()
        self.live[-2].grad[:2] = 0

    def assign_element(self):
        with torch.no_grad():
            self.model.head.weight[0, 0] = 1.0

    def draw(self):
        self.model.head.reset_parameters()

    def values(self):
        self.model.head.bias.detach().numpy()

    def train_another(self):
        self.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        self.step()

    def grad(self):
        torch.autograd.grad(self.forward(), self.live, allow_unused=True)

    def grad_of_gathered(self):
        loss = self.forward()
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        torch.autograd.grad(loss, parameters)

    def backward_to_inputs(self):
        self.forward().backward(inputs=self.optimizer.param_groups[0]["params"])

    def update_between(self):
        late = self.forward()
        self.step()
        late.backward()

    def read_kept_views(self):
        """Each way to read the memory of a view names the parameter; its shape is right."""
        linear = self.model.blocks[0].up
        hook = linear.register_forward_hook(_keep_rows)
        self.forward().backward()
        hook.remove()
        rows = KEPT.pop()
        assert rows.detach().shape == torch.zeros_like(rows).shape == (WIDTH - 1, WIDTH)
        if rows.untyped_storage().nbytes():  # with `ddp` the parameter is never freed
            rows.sum()
            return
        reads = (
            *(lambda: rows + 1, lambda: torch.stack([rows]), lambda: rows[0], rows.tolist),
            *(rows.numpy, lambda: repr(rows), lambda: copy.deepcopy(rows), lambda: rows.zero_()),
            *(lambda: nn.functional.linear(_batch(), rows), lambda: _batch()[:, :1].copy_(rows)),
        )
        for read in reads:
            with pytest.raises(RuntimeError, match=" of blocks.0.up.weight that was kept"):
                read()
        self.model(_batch()).sum().backward()
        rows.sum()


WRITTEN = "was written to while it was unsharded"
MISPLACED = "is not the parameter that parallelize has sharded: torch.func.functional_call"
HELD = "blocks.0.{} holds {}blocks.0.up.weight in a plain"
REFUSED = {
    "clamp": (Training.step, {"act": _clamp}, f"blocks.0.up.weight {WRITTEN}"),
    "clamp without gradients": (Training.evaluate, {"act": _clamp}, f"blocks.0.up.weight {WRITTEN}"),
    # Only rank 0 of each shard group sees it, and the all-reduce of the step status informs the
    # other ranks.
    "a row": (Training.step, {"act": _fill_a_row}, f"blocks.[01].up.weight {WRITTEN}"),
    "frozen": (Training.step, {"act": _move_frozen}, f"blocks.0.frozen {WRITTEN}"),
    "stash": (Training.step, {"act": _stash}, "blocks.[01].kept keeps the unsharded blocks.[01].up.weight"),
    "stash a parameter": (Training.evaluate, {"act": _stash_itself},
        "blocks.[01].last keeps the unsharded blocks.[01].up.bias"),
    "data": (Misuse.set_data, {}, r".*\.data was set to another tensor"),
    "functional_call": (Misuse.call_with_others, {}, MISPLACED),
    "no bias": (Misuse.drop_bias, {}, f"head.bias {MISPLACED}"),
    "late": (Misuse.add, {}, "temperature was added or unfrozen after parallelize"),
    "layer": (Misuse.replace_layer, {}, "head.weight was added or unfrozen after parallelize"),
    "number": (Misuse.number, {}, "reads a number from a DTensor"),
    "row of data": (Misuse.zero_a_row, {}, r"zero_\(\) writes to rows or columns of a DTensor"),
    "rows in place": (Misuse.rectify_rows, {}, r"relu\(\) writes to rows|a view of a leaf Variable"),
    "data of rows": (Misuse.write_to_data_of_rows, {}, r"add_\(\) writes to rows or columns of a DTensor"),
    "plain rows": (Misuse.add_plain_rows, {}, r"index_add_\(\) writes a plain tensor to a part .*apply_full"),
    "rows": (Misuse.assign_rows, {}, r"__setitem__\(\) .*apply_full"),
    "element": (Misuse.assign_element, {}, r"__setitem__\(\) writes to rows or columns of a DTensor"),
    "random": (Misuse.draw, {}, r"uniform_\(\) would draw the same values for all shards of a DTensor"),
    "values": (Misuse.values, {}, r"numpy\(\) .* tensor.full_tensor\(\)"),
    "another": (Misuse.train_another, {},
        r"SGD has a parameter of shape \(2, 2\) that belongs to no parallelized model"),
    "dict": (functools.partial(_write_into, dict), {}, "Writer changed a dict of its arguments"),
    "subclass": (functools.partial(_write_into, Named), {}, "Writer changed a Named of its arguments"),
    "defaultdict": (functools.partial(_write_into, _defaultdict), {}, "Writer was given a defaultdict"),
    "object": (functools.partial(_write_into, SimpleNamespace), {},
        "Writer changed a SimpleNamespace of its arguments"),
    "same memory": (Training.step, {"prepare": _see_same_memory},
        "head.weight and head.bias are two parameters in the same"),
    "hidden": (Training.step, {"prepare": _hide}, r"Stack.named_parameters\(\) omits head.weight"),
    "grad": (Misuse.grad, {}, r"torch.autograd.grad\(\) with inputs=blocks.0"),
    "grad of gathered": (Misuse.grad_of_gathered, {}, r"torch.autograd.grad\(\) with inputs=blocks.0"),
    "backward": (Misuse.backward_to_inputs, {}, r"torch.autograd.backward\(\) with inputs=blocks.0"),
    "update": (Misuse.update_between, {},
        "parameters of .* were changed between a forward and its backward.*optimizer.step"),
    "closure": (Training.step, {"prepare": functools.partial(_hold, "closure")}, HELD.format("project", "")),
    "partial": (Training.step, {"prepare": functools.partial(_hold, "partial")}, HELD.format("project", "")),
    "default": (Training.step, {"prepare": functools.partial(_hold, "default")}, HELD.format("project", "")),
    "buffer": (Training.step, {"prepare": functools.partial(_hold, "buffer")},
        HELD.format("view", "the memory of ")),
    "view": (Training.step, {"prepare": functools.partial(_hold, "view")},
        HELD.format("views", "the memory of ")),
    "kept views": (Misuse.read_kept_views, {}, r"sum\(\) uses a view of blocks.0.up.weight that was kept"),
    "two models": (Training.step, {"prepare": _share}, "head.weight is head.weight of another model"),
}  # fmt: skip


def _refusals(strategy):
    """Return the error of each case on this rank; the package must have raised it."""
    mesh = build_mesh(MeshSpec(**MESHES[strategy]), strategy)
    told = {}
    for name, (act, settings, _) in REFUSED.items():
        told[name] = ""
        try:
            act(Misuse(mesh, strategy, **settings))
        except (RuntimeError, ConfigError) as error:
            told[name] = str(error)
    return told


def _name_group(model):
    model.head.weight.decays = False


def _keep_clone(block):
    block.kept = block.up.weight[:2].clone()


def _normalize_head(model):
    nn.utils.spectral_norm(model.head)


class Use(Training):
    """Correct use in scripts; returns values for comparison other than the parameters."""

    def build_after_evaluation(self):
        self.evaluate()
        self.live = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.live, lr=0.5, foreach=True)
        average = [each.detach().clone() for each in self.live]
        self.step(2)
        for kept, each in zip(average, self.live, strict=True):
            kept.lerp_(each.detach(), 0.5)
        return average

    def clamp_after_evaluation(self):
        self.step()
        self.evaluate()
        for each in self.live:
            each.data.clamp_(-0.1, 0.1)
        self.step()

    def evaluate_before_update(self):
        self.optimizer = torch.optim.AdamW(self.live, lr=0.1, foreach=True)
        for _ in range(2):
            self.forward().backward()
            loss = self.forward()  # its backward is never called
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [loss.detach()]

    def target_without_gradients(self):
        for _ in range(2):
            loss = self.forward()
            self.evaluate()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train_twice(self):
        self.step(2)

    def state_of_a_parameter(self):
        first = self.live[0]
        for make in (first.new_zeros, first.new_ones, first.new_empty):
            self.model(_batch() + make(2, WIDTH).fill_(0.5)).square().sum().backward()
        self.optimizer.step()

    def freeze_one_more(self):
        self.model.extra = nn.Linear(2, 2).requires_grad_(False)
        self.step(2)
        del self.model.extra

    def infer_first(self):
        with torch.inference_mode():
            self.model(_batch())
        self.step(2)
        return []

    def fail_in_backward(self):
        def fail(_gradient):
            raise RuntimeError("out of memory")

        hook = self.model.blocks[1].register_forward_hook(
            lambda *given: given[2].register_hook(fail) and None
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            self.forward().backward()
        hook.remove()
        self.optimizer.zero_grad()
        self.step(2)
        return []

    def skip_group(self):
        self.live = [each for each in self.model.parameters() if getattr(each, "decays", True)]
        self.optimizer = torch.optim.SGD(self.live, lr=0.5)
        self.step(2)
        return []


RIGHT = {
    "built after evaluation": (Use.build_after_evaluation, {}),
    "clamped after evaluation": (Use.clamp_after_evaluation, {}),
    "evaluated before update": (Use.evaluate_before_update, {}),
    "target without gradients": (Use.target_without_gradients, {}),
    "inference before training": (Use.infer_first, {}),
    "exception in backward": (Use.fail_in_backward, {}),
    "group by attribute": (Use.skip_group, {"prepare": _name_group}),
    "spectral norm": (Use.train_twice, {"prepare": _normalize_head}),
    "frozen added": (Use.freeze_one_more, {}),
    "state outside": (Use.state_of_a_parameter, {}),
    "state inside": (
        Use.train_twice,
        {"act": lambda block: {"w": next(block.parameters()).new_ones(WIDTH, WIDTH)}},
    ),
    "clone kept": (Use.train_twice, {"act": _keep_clone}),
    "weight returned": (Use.train_twice, {"act": lambda block: {"w": block.up.weight}}),
    "detached returned": (Use.train_twice, {"act": lambda block: {"w": block.up.weight.detach()}}),
}


def _results(strategy):
    """Return by case the unsharded parameters after it, and its other results."""
    mesh = build_mesh(MeshSpec(**MESHES[strategy]), strategy) if strategy else None
    found = {}
    for name, (act, settings) in RIGHT.items():
        training = Use(mesh, strategy, **settings)
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
    ["hybrid", *(pytest.param(each, marks=pytest.mark.soak) for each in ("zero3", "ddp"))],
)
def test_misuse_of_parameters_is_correct_or_refused_by_name(ranks, strategy):
    right = (
        ("number", "row of data", "data of rows", "element", "kept views")
        if strategy == "ddp"
        else ()
    )
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
