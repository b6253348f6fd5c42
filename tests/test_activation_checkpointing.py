"""Activation checkpointing: saved and recomputed operators, with unchanged losses and gradients."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import training
from test_parity import BOUNDS, check, compare
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d.base.config import (
    ActivationCheckpointingConfig,
    BucketingConfig,
    CompileConfig,
    FSDPConfig,
    ParallelConfig,
    PrecisionConfig,
    PrefetchConfig,
)
from parallel2d.base.config.checks import validated
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.parallelize import activation_offload
from parallel2d.parallel.parallelize.activation_checkpointing import (
    checkpoint_activations,
    offload_activations,
    saved_operators,
)
from parallel2d.parallel.parallelize.activation_offload import offload_blocks
from parallel2d.parallel.parallelize.compilation import compile_blocks

AOT = CompileConfig("block", "aot_eager")


def selecting(*operators):
    return ActivationCheckpointingConfig("selective", keep=list(operators))


def few_heads(module, name):
    return name.endswith("attention")


def checkpointed(config, compilation=None):
    torch.manual_seed(0)
    model = training.build_llama(n_layers=2)
    for name, module in model.named_modules():
        model.init_weights(module, name)
    blocks = find_blocks(model)
    checkpoint_activations(model, blocks, config)
    if compilation is not None:
        compile_blocks(blocks, compilation, config.compiler_budget)
    return model


def saved_bytes(model):
    """Bytes that autograd keeps for backward after one forward, parameters not counted; each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {
        b.untyped_storage().data_ptr() for b in model.buffers()
    }
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, _ = training.global_batch(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens)
    del output
    return sum(kept.values())


class OperatorCounter(TorchDispatchMode):
    """Count the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def recomputed(config):
    """Return the operators that backward ran again, in comparison with a model without
    checkpointing.
    """
    counts = []
    for each in (config, ActivationCheckpointingConfig()):
        model = checkpointed(each)
        output = model(training.global_batch(0)[0]).square().mean()
        with OperatorCounter() as counter:
            output.backward()
        counts.append(counter.counts)
    more = {name: count - counts[1].get(name, 0) for name, count in counts[0].items()}
    return {name: count for name, count in more.items() if count}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_equal_checkpointed_blocks_share_one_compilation(mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = ActivationCheckpointingConfig(mode)
    tokens, _ = training.global_batch(0)
    plain, compiled = checkpointed(config), checkpointed(config, CompileConfig("block", "eager"))
    assert torch.equal(compiled(tokens), plain(tokens))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_full_recomputes_all_matmuls_and_selective_recomputes_none():
    full = recomputed(ActivationCheckpointingConfig("full"))
    assert full["aten::mm"] > 0
    selective = recomputed(ActivationCheckpointingConfig("selective"))
    assert "aten::silu" in selective
    assert not {name for name in selective if "mm" in name or "scaled_dot_product" in name}
    others = recomputed(selecting("scaled_dot_product_*", "silu"))
    assert others["aten::mm"] == full["aten::mm"]
    assert not {name for name in others if "silu" in name or "scaled_dot_product" in name}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["mm", "bnm"], "no operator is called bnm; did you mean bmm"),
        (["scaled_dot_produkt_*"], "no operator is called scaled_dot_produkt_"),
        (["matmul"], "matmul is decomposed into other operators.*mm, bmm and addmm"),
    ],
)
def test_operator_that_cannot_be_saved_is_an_error(keep, message):
    with pytest.raises(ConfigError, match=f"activation_checkpointing.keep: .*{message}"):
        checkpointed(selecting(*keep))


def test_operators_are_found_by_pattern_and_by_full_name():
    assert saved_operators(["mm", "aten::bmm"]) == {"aten::mm", "aten::bmm"}
    # all overloads have names, and one operator is computed as another operator of the same name
    assert saved_operators(["add", "softmax"]) == {"aten::add", "aten::_softmax"}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in saved_operators(
        ["scaled_dot_product_*"]
    )
    assert saved_operators(["all_reduce"]) == {"_c10d_functional::all_reduce"}


def saved_by(name, **settings):
    return saved_bytes(checkpointed(ActivationCheckpointingConfig(name, **settings)))


def test_modes_blocks_and_policies_select_saved_activations():
    none, selective, full = (saved_by(name) for name in ("none", "selective", "full"))
    less = saved_by("selective", keep=["scaled_dot_product_*"])
    # tensors cached by selective checkpointing are in a separate storage, in addition to the
    # tensors saved by autograd: only the saved tensors of autograd are visible here
    assert full <= less <= selective < none
    classes = saved_by("full", blocks=["FeedForward"])
    policy = saved_by("full", policy="test_activation_checkpointing:few_heads")
    assert full < classes < none
    assert full < policy < none
    assert classes != policy
    assert saved_by("full", every=2) == pytest.approx((full + none) / 2, rel=0.05)
    missing = r"activation_checkpointing.blocks=\['Feed'\]: no module of class Feed.*candidates"
    with pytest.raises(ConfigError, match=missing):
        saved_by("full", blocks=["Feed"])


@pytest.mark.slow
def test_smaller_budget_saves_fewer_activations():
    sizes = [
        saved_bytes(
            checkpointed(ActivationCheckpointingConfig("budget", memory_budget=budget), AOT)
        )
        for budget in (1.0, 0.4, 0.0)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize(("config", "message"), [
    ({"activation_checkpointing": "budget"}, "budget needs compile=block with compile.backend=inductor or "),
    ({"activation_checkpointing": "budget", "compile": CompileConfig("block", "eager")},
        "compile.backend=inductor or"),
    ({"activation_checkpointing": ActivationCheckpointingConfig("full", blocks=["A"], policy=few_heads)},
        "give one of them"),
])  # fmt: skip
def test_contradictions_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        validated(ParallelConfig(**config))


FEED_FORWARD = ActivationCheckpointingConfig("full", blocks=["FeedForward"])
BUDGET = ActivationCheckpointingConfig("budget", memory_budget=0.3)
OFFLOADED = {
    "offload": ActivationCheckpointingConfig("offload"),
    "every second": ActivationCheckpointingConfig("offload", every=2),
    "full": ActivationCheckpointingConfig("full", offload=True),
    "selective": ActivationCheckpointingConfig("selective", offload=True),
}
OFTEN = [
    ("hybrid", 2, "block", "full", {}),
    ("hybrid", 1, "block", "selective", {}),
    ("hybrid", 1, "layer", "full", {}),
]
RUNS = [
    ("hybrid", 2, "block", selecting("mm", "all_reduce"), {}),
    ("zero3", 1, "layer", selecting("bmm", "silu"), {}),
    ("ddp", 1, "layer", FEED_FORWARD, {}),
    ("ddp", 2, "block", selecting("mm", "all_reduce"), {}),
    ("ddp", 2, "block", ActivationCheckpointingConfig("full", blocks=["Attention"]), {}),
    ("hybrid", 1, "block", BUDGET, {"compile": AOT}),
    ("hybrid", 2, "block", "none", {"compile": AOT}),
    ("hybrid", 2, "block", "full", {"compile": AOT}),
    ("zero3", 2, "layer", "selective", {"compile": CompileConfig("block", "inductor")}),
    ("hybrid", 1, "block", "selective", {"compile": AOT}),
    # Groups inside of a recomputed region all-gather in its forward, and may be unsharded already
    # when it is recomputed.
    ("hybrid", 1, "layer", "selective", {"prefetch": PrefetchConfig(1, 2)}),
    ("hybrid_zero2", 1, "size", "selective", {"prefetch": PrefetchConfig(1, 2)}),
    ("zero3", 1, "layer", "full", {"prefetch": PrefetchConfig(2, 3)}),
    ("hybrid", 2, "block", "none", {"prefetch": PrefetchConfig(2, 3), "fsdp": FSDPConfig(2, True)}),
]


OFFLOAD_RUNS = [
    ("zero3", 1, "layer", "offload", {"prefetch": PrefetchConfig(1, 2)}),
    ("ddp", 1, "block", "offload", {}),
    ("hybrid_full", 1, "block", OFFLOADED["full"], {}),
    ("hybrid", 2, "block", OFFLOADED["selective"], {}),
    ("hybrid", 1, "block", "offload", {"compile": AOT}),
    ("hybrid", 2, "block", OFFLOADED["full"], {"compile": AOT}),
    ("hybrid", 1, "block", OFFLOADED["selective"], {"compile": AOT}),
]


@pytest.mark.parametrize(
    ("strategy", "tensor", "bucketing", "mode", "more"),
    [
        *OFTEN,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in RUNS),
    ],
)
def test_every_mode_equals_plain_pytorch(ranks, strategy, tensor, bucketing, mode, more):
    """Compare losses, the first gradient norm and the weights after a few steps; compiled where
    the mode or the case needs it.
    """
    bucketing = BucketingConfig("size", 0.01) if bucketing == "size" else bucketing
    config = {"strategy": strategy, "bucketing": bucketing, "activation_checkpointing": mode}
    check(ranks, 4, {"tensor": tensor}, {**config, **more}, accumulation=2 // tensor)


def _train_counting_copies(mesh, config, accumulation):
    """Train four layers; return also the number of storages that were copied to the host."""
    copies = []
    send = activation_offload._Region.send

    def counted(region):
        send(region)
        copies.append(len(region._sent))

    with mock.patch.object(activation_offload._Region, "send", counted):
        llama = {"n_layers": 4}
        result = training.train(mesh, config, steps=3, accumulation=accumulation, llama=llama)
    return result, sum(copies)


@pytest.mark.parametrize(
    ("strategy", "tensor", "bucketing", "mode", "more"),
    [
        ("hybrid", 2, "block", "offload", {}),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in OFFLOAD_RUNS),
    ],
)
def test_offload_equals_one_process(ranks, strategy, tensor, bucketing, mode, more):
    config = {"strategy": strategy, "bucketing": bucketing, "activation_checkpointing": mode}
    config |= {"precision": "fp64", **more}
    plain = ranks.run(1, _train_counting_copies, {}, {"precision": "fp64"}, 1)[0]
    run = ranks.run(4, _train_counting_copies, {"tensor": tensor}, config, 2 // tensor)[0]
    compare(run[0], plain[0], **BOUNDS["fp64"])
    assert run[1] > 0
    assert plain[1] == 0


def offloaded_step(config):
    """Return the loss and the gradients of a small model, and the bytes that the device keeps
    between forward and backward.
    """
    model = checkpointed(config)
    offload_activations(model, find_blocks(model), config)
    saved = {}

    def note(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(training.global_batch(0)[0]).square().mean()
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return loss.detach(), gradients, sum(saved.values())


@pytest.mark.parametrize("name", OFFLOADED)
def test_offload_equals_none_to_the_bit(name):
    config = OFFLOADED[name]
    plain = offloaded_step(replace(config, name="none", offload=False))
    loss, gradients, kept = offloaded_step(config)
    assert torch.equal(loss, plain[0])
    assert all(map(torch.equal, gradients, plain[1]))
    assert kept < plain[2]


class Halves(torch.nn.Module):
    """Two blocks, whose results the caller changes with ``change``."""

    def __init__(self, change):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sigmoid()) for _ in range(3)
        )
        self.change = change

    def forward(self, x):
        for block in self.blocks:
            x = self.change(block(x))
        return x


def test_offload_copies_every_region_but_the_last_and_frees_its_memory():
    model = Halves(lambda x: x)
    offload_blocks(list(model.blocks.named_children()))
    x = torch.rand(64, 64, requires_grad=True)
    nodes = []
    output = model(x)
    node = output.grad_fn
    while node is not None:
        if node.name().startswith("Sigmoid"):
            nodes.append(node)
        node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and node.name().startswith("Addmm"):
            node = node.next_functions[1][0]
    handles = [each._raw_saved_result.data for each in nodes]
    assert [each.memory.device is None for each in handles] == [False, True, True]
    assert [each.memory.host is None for each in handles] == [True, False, False]


def test_offload_reports_saved_tensors_that_change_in_place():
    for change in (lambda x: x.mul_(2), torch.nn.functional.relu_):
        model = Halves(change)
        offload_blocks(list(model.blocks.named_children()))
        output = model(torch.rand(64, 64))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def _low_precision(checkpointing):
    precision = PrecisionConfig(param="bf16", fp32_modules=["RMSNorm"])
    config = {
        "strategy": "zero3",
        "precision": precision,
        "activation_checkpointing": checkpointing,
    }
    return training.train({}, config, steps=3)["losses"]


def test_selective_checkpointing_works_with_fp32_modules(ranks):
    assert ranks.run(2, _low_precision, "selective")[0] == ranks.run(2, _low_precision, "none")[0]
