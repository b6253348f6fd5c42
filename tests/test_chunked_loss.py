"""The loss without full logits: as a function, on models of every kind, on every strategy, and its
peak memory.
"""

import copy
import itertools
from functools import partial
from typing import ClassVar

import jobs
import pytest
import torch
import torch.nn.functional as F
import training
from test_parity import STRATEGIES, compare, initial_model, layout, named, pairwise, world_of
from torch import Tensor, nn

from parallel2d import (
    ChunkedHead,
    ConfigError,
    MeshSpec,
    build_mesh,
    cross_entropy_from_hidden,
    cross_entropy_sum,
)
from parallel2d.base.config import CompileConfig
from parallel2d.parallel.chunked_head import find_head

ROWS, DIM, VOCAB = 37, 6, 11


def capped(logits: Tensor) -> Tensor:
    return 5 * torch.tanh(logits / 5)


def case(dtype=torch.float64, vocab=VOCAB):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        (torch.randn(*size, generator=generator, dtype=torch.float64) * 2).to(dtype)
        for size in ((ROWS, DIM), (vocab, DIM), (vocab,))
    )
    targets = torch.randint(0, vocab, (ROWS,), generator=generator)
    targets[::4] = -100
    return [tensor.requires_grad_() for tensor in (hidden, weight, bias)], targets


def plain_loss(hidden, weight, bias, targets, after=None, z_loss=0.0):
    logits = F.linear(hidden, weight, bias)
    logits = logits if after is None else after(logits)
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss + z_loss * logits.logsumexp(1)[targets != -100].square().sum()


def same(ours, plain, inputs):
    assert ours.item() == pytest.approx(plain.item(), rel=1e-13)
    found, expected = (torch.autograd.grad(loss * 0.3, inputs) for loss in (ours, plain))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("chunk", "with_bias", "after", "z_loss"),
    [
        (1, True, None, 0.0),
        (5, True, capped, 0.3),
        (100, False, capped, 0.0),
        (5, False, None, 0.3),
    ],
)
def test_chunked_loss_equals_torch_cross_entropy(chunk, with_bias, after, z_loss):
    (hidden, weight, bias), targets = case()
    bias = bias if with_bias else None
    ours = cross_entropy_from_hidden(
        hidden, weight, targets, chunk, bias=bias, after=after, z_loss=z_loss
    )
    plain = plain_loss(hidden, weight, bias, targets, after, z_loss)
    same(ours, plain, [tensor for tensor in (hidden, weight, bias) if tensor is not None])


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_low_precision_logits_give_a_loss_in_fp32(dtype, bound):
    inputs, targets = case(dtype)
    ours = cross_entropy_from_hidden(*inputs[:2], targets, 8, bias=inputs[2])
    assert ours.dtype == torch.float32
    ours.backward()
    precise = [tensor.detach().double().requires_grad_() for tensor in inputs]
    plain_loss(*precise, targets).backward()
    for tensor, exact in zip(inputs, precise, strict=True):
        assert tensor.grad.dtype == dtype
        assert (tensor.grad.double() - exact.grad).norm() <= bound * exact.grad.norm()


def test_autocast_casts_only_the_matmul_and_keeps_fp64():
    inputs, targets = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = cross_entropy_from_hidden(*inputs[:2], targets, 8, bias=inputs[2])
    ours.backward()
    narrow = [tensor.detach().bfloat16() for tensor in inputs]
    assert ours.item() == cross_entropy_from_hidden(*narrow[:2], targets, 8, bias=narrow[2]).item()
    assert all(tensor.grad.dtype == torch.float32 for tensor in inputs)
    inputs, targets = case()
    with torch.autocast("cpu", torch.bfloat16):
        ours = cross_entropy_from_hidden(*inputs[:2], targets, 8, bias=inputs[2])
    assert ours.item() == pytest.approx(plain_loss(*inputs, targets).item(), rel=1e-13)


def test_only_ignored_targets_none_and_huge_logits_stay_finite():
    (hidden, weight, _), targets = case(torch.float32)
    nothing = cross_entropy_from_hidden(hidden, weight, torch.full_like(targets, -100), 8)
    nothing.backward()
    assert nothing.item() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0
    empty = cross_entropy_from_hidden(hidden[:0], weight, targets[:0], 8)
    assert empty.item() == 0
    assert torch.autograd.grad(empty, weight)[0].abs().max() == 0
    huge = cross_entropy_from_hidden(hidden * 1e25, weight, targets, 8)
    assert huge.isfinite()


def test_frozen_inputs_get_no_gradient_and_backward_runs_once():
    (hidden, weight, _), targets = case()
    loss = cross_entropy_from_hidden(hidden, weight.detach(), targets, 8)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    with pytest.raises(RuntimeError, match="kept for one only"):
        loss.backward()
    loss = cross_entropy_from_hidden(torch.tanh(hidden), weight, targets, 8)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with torch.no_grad():
        assert not cross_entropy_from_hidden(hidden, weight, targets, 8).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk=0 must be a whole number"),
        ({"hidden": torch.ones(ROWS, 5)}, r"\[\.\.\., dim\]"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "one target for each"),
        ({"targets": torch.full((ROWS,), VOCAB)}, "a target has no logit"),
        ({"weight": "head"}, "weight is a str"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    (hidden, weight, _), targets = case()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "chunk": 8} | change
    with pytest.raises((ConfigError, RuntimeError), match=message):
        cross_entropy_from_hidden(**arguments)


def _split_vocabulary(vocab):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = build_mesh(MeshSpec(tensor=2), "ddp")["tensor"]
    (hidden, weight, bias), targets = case(vocab=vocab)
    plain = plain_loss(hidden, weight, bias, targets, capped, 0.2)
    expected = torch.autograd.grad(plain, (hidden, weight, bias))
    # On the way to the loss, as the input of a split layer is.
    whole = distribute_tensor(hidden.detach(), mesh, [Replicate()]).requires_grad_()
    split = [
        distribute_tensor(tensor.detach(), mesh, [Shard(0)]).requires_grad_()
        for tensor in (weight, bias)
    ]
    loss = cross_entropy_from_hidden(
        whole, split[0], targets, 8, bias=split[1], after=capped, z_loss=0.2
    )
    found = torch.autograd.grad(loss, (whole, *split))
    differences = [
        (one.full_tensor() - other).abs().max().item()
        for one, other in zip(found, expected, strict=True)
    ]
    return abs(loss.item() - plain.item()), max(differences)


@pytest.mark.parametrize("vocab", [11, 1])
def test_vocabulary_parallel_loss_equals_unsharded_loss(ranks, vocab):
    for loss, gradient in ranks.run(2, _split_vocabulary, vocab):
        assert loss <= 1e-11
        assert gradient <= 1e-12


class Capped(nn.Module):
    """A head with a bias, a scale that is a buffer, and a soft cap."""

    init_weights = None  # one for each module
    plan: ClassVar = {"head": "colwise_gather_output"}

    def __init__(self, **_sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(training.VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, training.VOCAB)
        self.register_buffer("scale", torch.tensor(1.7))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens)) * self.scale
        logits = torch.tanh(logits / 3.0)
        return logits.mul(3.0)


class Tied(Capped):
    def __init__(self, **_sizes) -> None:
        super().__init__()
        self.head = nn.Linear(16, training.VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens)).to(torch.float64)


def _initial(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


TiedLlama = partial(training.Llama, tie_embeddings=True)
PRODUCT = itertools.product((Capped, Tied), STRATEGIES, ("layer", "block", "size"), (1, 2), (1, 2))
CASES = [(*case, {}) for case in pairwise(list(PRODUCT))]
# The logits of a Llama stay split over the tensor axis.
LLAMAS = [
    (training.Llama, "hybrid", "layer", 2, 2, {"activation_checkpointing": "full"}),
    (TiedLlama, "hybrid_full", "layer", 1, 2, {"compile": CompileConfig("block", "eager")}),
    (training.Llama, "zero3", "block", 2, 1, {}),
    (TiedLlama, "ddp", "size", 1, 1, {}),
    (TiedLlama, "hybrid_zero2", "block", 2, 2, {}),
]


# The first six have every strategy and every other value.
@pytest.mark.parametrize(
    "case",
    [
        *CASES[:6],
        *(pytest.param(case, marks=pytest.mark.slow) for case in (*CASES[6::2], *LLAMAS[:3])),
        *(pytest.param(case, marks=pytest.mark.soak) for case in (*CASES[7::2], *LLAMAS[3:])),
    ],
    ids=lambda case: named((getattr(case[0], "__name__", "TiedLlama"), *case[1:5])),
)
def test_training_equals_plain_pytorch_on_every_layout(ranks, case):
    kind, strategy, bucketing, tensor, accumulation, more = case
    config = {**layout(strategy, bucketing), "precision": "fp64", **more}
    options = {"steps": 2, "accumulation": accumulation, "loss_chunk": 7, "llama": {"kind": kind}}
    run = ranks.run(
        world_of(strategy, tensor), training.train, {"tensor": tensor}, config, **options
    )[0]
    expected = training.reference(initial_model(kind), steps=2, dtype=torch.float64)
    compare(run, expected, losses=1e-12, norm=1e-12, weights=1e-9)


@pytest.mark.parametrize("change", ["spectral norm", "scale"])
def test_parametrized_head_and_logit_scale_equal_plain_loss(change):
    model = _initial(Capped)
    if change == "scale":
        model.scale = torch.full((1, 1, 1), 1.7, dtype=torch.float64)
    else:
        # Each time that its weight is read in training, its estimate of the norm is improved.
        nn.utils.parametrizations.spectral_norm(model.head)
    head = ChunkedHead(copy.deepcopy(model), 8)
    tokens, targets = training.global_batch(0)
    for _ in range(2):
        plain = cross_entropy_sum(model(tokens), targets)
        assert head.loss(targets, tokens).item() == pytest.approx(plain.item(), rel=1e-13)


class Conditioned(Capped):
    """Takes positions that all samples share, and a vector for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(600, 16)

    def forward(self, tokens, positions, condition):
        x = self.hidden(tokens) + self.position(positions) + condition[:, None]
        return self.head(x)


def test_inputs_shorter_than_targets_use_unchunked_loss():
    model = _initial(Conditioned)
    tokens = torch.arange(1000).view(2, 500) % training.VOCAB
    inputs = (tokens, torch.arange(500)[None], torch.ones(2, 16, dtype=torch.float64))
    plain = cross_entropy_sum(model(*inputs), tokens)
    loss = ChunkedHead(model, 64).loss(tokens, *inputs)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-13)


class Otherwise(Capped):
    """Compute the logits from the inputs of the head in a different way."""

    def __init__(self, logits) -> None:
        super().__init__()
        self.logits = logits
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return self.logits(self, self.hidden(tokens))


class Elsewhere(Capped):
    """Its last Linear is not its head."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(16, 1)

    def forward(self, tokens):
        x = self.hidden(tokens)
        self.value(x)
        return self.head(x)


def padded(model, hidden):
    logits = model.head(hidden)
    logits[..., 60:] = -torch.inf
    return logits


def different(model, hidden):
    logits = model.head(hidden)
    return logits * 2 if isinstance(logits, Tensor) else logits


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (lambda model, x: model.head(x) * model.factor, "mul with a parameter"),
        (lambda model, x: model.head(x) + torch.arange(67), "add with a tensor of shape"),
        (lambda model, x: model.head(x)[..., :-1], "uses indexing"),
        (padded, "uses assignment to an index"),
        (lambda model, x: 1 - model.head(x), "uses a subtraction from a number"),
        (lambda model, x: model.head(x) + model.head(x), "uses add of two of them"),
        (None, "is not the result of one call of value"),
        (different, "differs from the plain loss"),
        (lambda model, x: (model.head(x), model.head(x))[1], "2 calls"),
        (lambda model, x: model.head(x[:, 1:]), "each target needs one row"),
    ],
)
def test_models_with_a_different_chunked_loss_are_refused(logits, message):
    torch.manual_seed(0)
    model = (Elsewhere() if logits is None else Otherwise(logits)).double()
    head = ChunkedHead(model, 8)
    tokens, targets = training.global_batch(0)
    with pytest.raises(ConfigError, match=message):
        head.loss(targets, tokens)
    assert model.training


@pytest.mark.parametrize("name", ["", "head"])
def test_hooks_of_the_backward_of_logits_are_refused(name):
    model = _initial(Capped)
    head = ChunkedHead(model, 8)
    tokens, targets = training.global_batch(0)
    handle = model.get_submodule(name).register_full_backward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=f"{name or 'Capped'} has a hook for its backward"):
        head.loss(targets, tokens)
    handle.remove()
    head.loss(targets, tokens).backward()


def test_model_that_changes_its_use_of_logits_is_an_error():
    model = _initial(Capped)
    head = ChunkedHead(model, 8)
    tokens, targets = training.global_batch(0)
    head.loss(targets, tokens)
    model.scale = torch.tensor(1.7, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="did .* with its logits"):
        head.loss(targets, tokens)


def test_a_model_without_a_plain_linear_as_head_is_refused():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    with pytest.raises(ConfigError, match="no Linear outside of its repeated blocks"):
        find_head(nn.Sequential(nn.Embedding(8, 4), Own(4, 8)))
    with pytest.raises(ConfigError, match="chunk=0"):
        ChunkedHead(_initial(Capped), 0)
    with pytest.raises(ConfigError, match="not a plain Linear"):
        ChunkedHead(_initial(Capped), 8, "embed")


@pytest.mark.slow
def test_fully_compiled_model_has_an_equal_chunked_loss():
    model = _initial(Capped)
    tokens, targets = training.global_batch(0)
    plain = cross_entropy_sum(model(tokens), targets)
    head = ChunkedHead(torch.compile(model, backend="eager"), 8)
    same(head.loss(targets, tokens), plain, list(model.parameters()))


def test_logits_are_unchanged_and_a_copy_uses_its_own_head():
    model = _initial(Capped)
    tokens, targets = training.global_batch(0)
    before = model(tokens)
    head = ChunkedHead(model, 8)
    head.loss(targets, tokens)
    assert torch.equal(model(tokens), before)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(twin(tokens), before)
    assert list(model.state_dict()) == list(twin.state_dict())


def _peak(run):
    """Return the peak of the bytes allocated while ``run`` runs, above the bytes allocated before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_peak_memory_falls_by_logits_and_their_gradient():
    model = training.build_llama(vocab_size=8192)
    tokens = torch.arange(512).view(1, 512)
    head = ChunkedHead(model, 64)
    head.compare(tokens, tokens)
    whole = _peak(lambda: cross_entropy_sum(model(tokens), tokens).backward())
    model.zero_grad()
    chunked = _peak(lambda: head.loss(tokens, tokens).backward())
    logits = 512 * 8192 * 4
    # One chunk of logits and its softmax remain.
    assert whole - chunked >= 1.6 * logits


def _rows(ranks, folder, name, words, steps=2):
    words += ("checkpoint.enabled=false", "train.validate_every=2", "train.micro_batch_size=2")
    ranks.run(4, jobs.run, str(folder), str(folder / name), words, steps)
    return jobs.rows(folder / name)


SPLIT = ("strategy=hybrid", "mesh.replicate=1", "mesh.shard=2", "mesh.tensor=2")


def check_job(ranks, folder, words, bound):
    """Assert that a job in chunks has the losses, norms and validation of a job with full logits;
    return the rows of both.
    """
    plain = _rows(ranks, folder, "plain", words)
    chunked = _rows(ranks, folder, "chunked", (*words, "train.loss_chunk=9"))
    assert len(plain) == len(chunked) == 2
    for one, other in zip(plain, chunked, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=bound)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=10 * bound)
    assert chunked[-1]["validation/loss"] == pytest.approx(plain[-1]["validation/loss"], rel=bound)
    return plain, chunked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "bound"),
    [
        (SPLIT, 1e-12),
        (("strategy=hybrid", "precision=bf16"), 3e-3),
        (("strategy=hybrid", "precision=fp16"), 3e-3),
    ],
)
def test_job_has_losses_and_traffic_of_a_run_with_full_logits(ranks, folder, words, bound):
    plain, chunked = check_job(ranks, folder, words, bound)
    assert plain[-1]["loss"] < plain[0]["loss"]
    for key in ("comm/shard/bytes", "comm/shard/calls", "comm/tensor/bytes"):
        assert chunked[-1].get(key) == plain[-1].get(key), key
    assert plain[-1]["comm/shard/bytes"] > 0


@pytest.mark.slow
def test_validation_is_without_z_loss(ranks, folder):
    words = ("strategy=zero3", "optimizer.lr=1e-30")
    plain = _rows(ranks, folder, "plain", words)[-1]
    for chunk in ("null", "9"):
        z = _rows(
            ranks, folder, f"z_{chunk}", (*words, "train.z_loss=0.01", f"train.loss_chunk={chunk}")
        )[-1]
        assert z["validation/loss"] == pytest.approx(plain["validation/loss"], rel=1e-12)
        # The log-sum-exp of the small vocabulary's logits is about 6 at first.
        assert 0.1 < z["loss"] - plain["loss"] < 1


# Models of a library

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
LIBRARY_MODELS = {
    "gemma2": {**_SIZES, "head_dim": 4, "final_logit_softcapping": 0.5},
    "cohere": {**_SIZES, "logit_scale": 0.3},
    "granite": {**_SIZES, "logits_scaling": 7.0},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 300, "resid_pdrop": 0.1},
}


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("kind", LIBRARY_MODELS)
def test_transformers_model_has_the_loss_of_its_full_logits(kind):
    from parallel2d.models import huggingface

    torch.manual_seed(0)
    model = huggingface.build(architecture=kind, arguments=LIBRARY_MODELS[kind]).double()
    tokens, targets = training.global_batch(0)
    head = ChunkedHead(model, 7)
    head.compare(targets, tokens)
    torch.manual_seed(1)  # of dropout
    plain = cross_entropy_sum(model(tokens).logits, targets)
    torch.manual_seed(1)
    loss = head.loss(targets, tokens)
    same(loss, plain, [parameter for parameter in model.parameters() if parameter.requires_grad])


@pytest.mark.extras("transformers")
def test_loss_over_a_part_of_its_targets_is_refused(ranks, folder):
    sizes = "{d_model: 16, d_kv: 4, d_ff: 24, num_layers: 2, num_heads: 4, vocab_size: 300}"
    words = ("model=hf", "model.architecture=t5", f"model.arguments={sizes}", "train.loss_chunk=9")
    with pytest.raises(AssertionError, match="ignores the first targets of each sequence"):
        _rows(ranks, folder, "t5", words)
