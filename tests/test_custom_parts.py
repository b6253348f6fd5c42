"""Custom model outputs, losses and data through the train command: losses that do not depend on
the layout; other losses are refused.
"""

import contextlib
import json
from types import SimpleNamespace

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.parallelize.layout import SampleShape, TensorShape
from parallel2d.training.data.batch import Batch
from parallel2d.training.data.opening import open_data
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.loss.rule import LossRule, find_rule
from parallel2d.training.model_families import ModelParts

VOCABULARY, LENGTH = 320, 16


class NanoGPT(nn.Module):
    """A model like nanoGPT: ``(logits, loss)``, a mean over targets that are not -1; without
    targets only the last position.
    """

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.wte = nn.Embedding(vocabulary, 16)
        self.h = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, vocabulary)

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, self.loss(logits, targets)

    def hidden(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], dtype=torch.float64)
        return self.h(self.wte(idx), mask=mask, is_causal=True)

    def loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


class Balanced(NanoGPT):
    """A loss with a term that is not a mean over targets."""

    def loss(self, logits, targets):
        return super().loss(logits, targets) + logits.mean().square()


class Library(NanoGPT):
    """A model with the conventions of transformers: labels are shifted inside, and -100 is
    ignored.
    """

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.hidden(input_ids))
        loss = None
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
        output = {"loss": loss, "logits": logits}
        return SimpleNamespace(**output) if loss is None else output


class Answers:
    """Sequences with different numbers of valid labels, some with none."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) * (index + 1) + index) % 97
        labels = ids.clone()
        labels[: 8 * (index % 3)] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def answers(samples: int = 50):
    return Answers(samples), default_collate


class Trees(nn.Module):
    """An autoencoder, which returns a scalar: a mean over all values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))

    def forward(self, x):
        return (self.layers(x) - x).square().mean()


def vectors():
    return [(torch.arange(6.0) * (index % 7) / 10).sin() for index in range(40)]


def mean_absolute(output, targets):
    return (output[..., 0] - targets).abs().mean()


def pairs():
    return [(each, each.sum()) for each in vectors()]


NANO = (
    "model=custom",
    "model.target=test_custom_parts:NanoGPT",
    "data.packing=padded",
    "data.path=rows.jsonl",
)
OWN = ("model=custom", "data=custom")
JOBS = {
    "nano": NANO,
    "library": (
        *OWN,
        "model.target=test_custom_parts:Library",
        "data.target=test_custom_parts:answers",
    ),
    "aligned": (*NANO, "model.target=test_custom_parts:Library"),
    "scalar": (
        *OWN,
        "model.target=test_custom_parts:Trees",
        "data.target=test_custom_parts:vectors",
    ),
    "function": (
        *OWN,
        "model.target=torch.nn:Linear",
        "model.arguments={in_features: 6, out_features: 1}",
        "data.target=test_custom_parts:pairs",
        "train.loss=test_custom_parts:mean_absolute",
    ),
}
LAYOUTS = {
    # One micro-batch holds the global batch, so that the loss of the model is the global mean.
    "whole": (1, ("train.micro_batch_size=16",)),
    "hybrid": (4, ("strategy=hybrid", "mesh.replicate=2", "train.micro_batch_size=2")),
}


@pytest.mark.parametrize(
    "job", [job if job == "nano" else pytest.param(job, marks=pytest.mark.slow) for job in JOBS]
)
def test_custom_loss_is_the_global_mean_on_any_layout(ranks, folder, job):
    rows = [json.dumps({"text": "x" * (3 + 5 * (i % 4))}) for i in range(400)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    words = (*JOBS[job], "optimizer=sgd", "optimizer.clip_norm=inf", "train.validate_every=3")
    if "data=custom" in words:
        words = (*words, "data.validation={other: {arguments: {}}}")
    for name, (count, more) in LAYOUTS.items():
        run = str(folder / name)
        ranks.run(count, jobs.run, str(folder), run, (*words, *more), 4)
    # Resume from step 4 on another number of ranks.
    for name in ("hybrid", "whole"):
        ranks.run(2, jobs.run, str(folder), str(folder / name), (*words, "strategy=zero3"), 2)
    expected = jobs.rows(folder / "whole")
    keys = "loss grad_norm tokens data/batch_hash validation/loss validation/other/loss"
    for row, other in zip(jobs.rows(folder / "hybrid"), expected, strict=True):
        for key in keys.split():
            assert row.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-10, abs=0), key
    assert len(expected) == 6
    assert "validation/loss" in expected[2] or "validation/other/loss" in expected[2]
    if job == "nano":
        assert expected[0]["tokens"] < 16 * LENGTH


def cross_entropy(ignored=-100, shift=0, reduction="mean"):
    def loss(logits, targets):
        logits, targets = logits[:, : LENGTH - shift], targets[:, shift:]
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=ignored, reduction=reduction
        )

    return loss


def by_sequence(logits, targets):
    """The mean over sequences of the means over their targets."""
    each = F.cross_entropy(logits.mT, targets, reduction="none")
    return (each.sum(1) / (targets != -100).sum(1)).mean()


RULES = {
    "nanoGPT": (cross_entropy(-1), LossRule("targets", -1)),
    "padding": (cross_entropy(0), LossRule("targets", 0)),
    "shifted": (cross_entropy(shift=1), LossRule("targets", -100, 1)),
    "sum": (cross_entropy(reduction="sum"), LossRule("none", -100)),
    "sequences": (by_sequence, LossRule("samples", -100)),
    "no targets": (lambda logits, _: logits.square().mean(), LossRule("samples", None)),
    "logits": (lambda logits, _: None, None),
    "batch": (lambda logits, _: logits.mean(0).square().mean(), "neither a sum nor a mean"),
    "nothing": (lambda logits, _: logits.sum() * 0, "not a number that shows its divisor"),
    "micro-batch": (
        lambda logits, _: logits.new_tensor(len(logits)).clamp(1, 2) - logits.mean() * 0,
        "train.loss_is=mean_per_micro_batch",
    ),
}


def tried(loss, **options):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, LENGTH, 9, generator=generator, dtype=torch.float64)
    targets = torch.randint(9, (3, LENGTH), generator=generator)

    def run(targets, rows):
        return loss(logits[rows], targets[rows])

    given = {"ignored": None, "is_declared": False, "bound": 1e-10, **options}
    return find_rule(run, targets, **given)


@pytest.mark.parametrize("name", RULES)
def test_loss_denominator_is_detected(name):
    loss, expected = RULES[name]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            tried(loss)
        assert tried(loss, is_declared=True).divisor == "samples"
    else:
        assert tried(loss) == expected


def test_term_next_to_the_cross_entropy_must_not_depend_on_layout():
    """Routers with small logits are nearly balanced; with weights of zero they are balanced exactly."""
    size = [0.01]

    def with_term(term):
        return lambda logits, targets: cross_entropy(-1)(logits, targets) + 0.02 * term(logits)

    def balanced(logits):
        return (size[0] * logits).softmax(-1).mean((0, 1)).square().sum()

    @contextlib.contextmanager
    def other_weights():
        size[0] = 1.0
        yield
        size[0] = 0.01

    with pytest.raises(ConfigError, match="the term next to the cross-entropy in the loss of 3"):
        tried(with_term(balanced), bound=1e-8)
    size[0] = 0.0
    assert tried(with_term(balanced), bound=1e-8) == LossRule("targets", -1)
    with pytest.raises(ConfigError, match="the term next to the cross-entropy in the loss of 3"):
        tried(with_term(balanced), bound=1e-8, other_weights=other_weights)
    # A constant, such as a norm of weights, adds up.
    assert tried(with_term(lambda _: 3.0), bound=1e-4) == LossRule("targets", -1)


def loss_of(forward, *words):
    module = type("Own", (nn.Module,), {"forward": forward})()
    data = () if "data=bin" in words else ("data=custom", "data.target=a:b")
    config = jobs.config_of(("model=custom", "model.target=a:b", *data, *words))
    return ModelLoss(config, ModelParts(module, None, None, None))


def test_batch_fields_reach_forward_by_parameter_name():
    one, two, y = TensorShape((1,)), TensorShape((2,)), TensorShape((3,))
    for forward, inputs, expected in [
        (lambda self, idx, targets=None: 0, one, ((one,), {"targets": y})),
        (lambda self, anything: 0, one, ((one,), {})),
        (lambda self, mask, x, y: 0, one, ((), {"x": one, "y": y})),
        (lambda self, a, b, labels=None: 0, (one, two), ((one, two), {"labels": y})),
        (lambda self, labels, a, b: 0, (one, two), ((), {"a": one, "b": two, "labels": y})),
        (lambda self, a, b=None: 0, {"b": one, "a": two}, ((), {"a": two, "b": one})),
        (lambda self, *args, **named: 0, one, ((one,), {})),
        (lambda self, x, t, y: 0, (one, two, one), ((one, two, one), {})),
        (lambda self, x, y: 0, {"x": one, "y": two}, ((), {"x": one, "y": two})),
    ]:
        assert loss_of(forward).arguments(inputs, y) == expected
    for forward, inputs, message in [
        (
            lambda self, x, mask: 0,
            one,
            r"does not take a batch of data=custom, 1 tensors and \[\] by name: missing.*'mask'",
        ),
        (lambda self, x: 0, {"x": one, "z": one}, "got an unexpected keyword argument 'z'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            loss_of(forward).check(SampleShape("samples", inputs, y))
    # Token data have a target for each position; a model that shifts gets each position's token.
    loss = loss_of(lambda self, input_ids, labels: 0, "data=bin", "data.path=a")
    tokens = torch.arange(5, 10)[None]
    batch = Batch(tokens, tokens + 1, None, hash=0, valid_tokens=5)
    loss._rule = LossRule("targets", -1, 1)
    prepared = loss.prepare(batch)
    assert prepared.targets.tolist() == [[-1, 6, 7, 8, 9]]
    assert prepared.valid_tokens == 4
    with pytest.raises(ConfigError, match="takes targets and labels: which are the targets"):
        loss_of(lambda self, x, labels, targets: 0)
    with pytest.raises(ConfigError, match="Own has no forward.*the module inside"):
        loss_of(nn.Module.forward)
    for word in ("train.z_loss=0.1", "train.loss_chunk=8"):
        with pytest.raises(
            ConfigError, match="takes y and computes its own loss, which ignores this key"
        ):
            loss_of(lambda self, x, y: 0, word)


def test_a_loss_that_depends_on_the_layout_must_be_declared(ranks, folder):
    from workers import WorkerError

    words = ("model=custom", "model.target=test_custom_parts:Balanced", "checkpoint.enabled=false")
    with pytest.raises(WorkerError, match="with 1 and 32 valid targets: it is neither a sum nor"):
        ranks.run(1, jobs.run, str(folder), str(folder / "run"), words, 1)
    words = (*words, "train.loss_is=mean_per_micro_batch")
    ranks.run(1, jobs.run, str(folder), str(folder / "run"), words, 2)
    assert jobs.rows(folder / "run")[1]["tokens"] == 2 * 16 * LENGTH
    for target, more, message in [
        ("Logits", "train.loss_is=mean_per_micro_batch", "has no effect: Logits gives logits"),
        ("Alone", "train.loss_is=auto", "Alone returned a loss, and takes no targets: name them"),
    ]:
        words = (*words, f"model.target=test_custom_parts:{target}", more)
        with pytest.raises(WorkerError, match=message):
            ranks.run(1, jobs.run, str(folder), str(folder / target), words, 1)


class Small(nn.Module):
    """Computes its loss in its own forward, in one of several ways."""

    def __init__(self, way="cross_entropy"):
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.way = way

    def forward(self, idx, targets=None):
        logits = self.head(self.wte(idx)).flatten(0, 1)
        if self.way == "cross_entropy":
            return logits, F.cross_entropy(logits, targets.flatten())
        if self.way == "by hand":
            each = torch.log_softmax(logits, -1).gather(1, targets.flatten()[:, None])
            return logits, -each.mean()
        return logits.square().mean()


def test_custom_loss_is_computed_in_fp32_with_bf16(ranks, folder):
    """Losses are in fp32, as with autocast; a loss without an fp32 form is refused."""
    for way in ("cross_entropy", "by hand"):
        torch.manual_seed(0)
        model = Small(way)
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(tokens, tokens.roll(1))[1]
        config = jobs.config_of(("model=custom", "model.target=a:b", "precision=bf16"))
        loss = ModelLoss(config, ModelParts(model, None, None, None))
        found = loss.value(model.bfloat16(), tokens, tokens.roll(1))
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected.item(), rel=2e-3)
    words = ("model=custom", "model.target=test_custom_parts:Small", "precision=bf16")
    words = (*words, "checkpoint.enabled=false")
    for compiled in (
        (),
        ("compile=block", "compile.backend=aot_eager", "bucketing.blocks=[Linear]"),
    ):
        run = folder / f"run{len(compiled)}"
        ranks.run(1, jobs.run, str(folder), str(run), (*words, *compiled), 2)
        losses = torch.tensor([row["loss"] for row in jobs.rows(run)])
        assert not torch.equal(losses, losses.bfloat16().float())
    words = (*words, "model.arguments={way: squares}")
    from workers import WorkerError

    with pytest.raises(WorkerError, match="the loss is computed in torch.bfloat16, which rounds"):
        ranks.run(1, jobs.run, str(folder), str(folder / "refused"), words, 1)


class Logits(NanoGPT):
    def forward(self, idx):
        return self.head(self.hidden(idx))


class Alone(NanoGPT):
    def forward(self, idx):
        return self.loss(self.head(self.hidden(idx))[:, :-1].contiguous(), idx[:, 1:].contiguous())


def test_token_id_file_is_read_unchanged(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50257, 1000).astype("<u2")
    ids.tofile(tmp_path / "train.bin")
    sets = {"val": {"path": str(tmp_path / "train.bin")}}
    config = DataConfig(name="bin", path=str(tmp_path / "train.bin"), validation=sets)
    data = open_data(config, seed=0, seq_len=8)
    assert len(data.train) == len(data.named_validation["val"]) == 125
    batch = data.train.read(range(125))
    whole = ids.astype(np.int64)
    for row, targets in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
        (start,) = [
            at for at in range(0, 1000, 8) if whole[at : at + 2].tolist() == row[:2].tolist()
        ]
        assert row[:7].tolist() == whole[start : start + 7].tolist()
        assert targets[:7].tolist() == whole[start + 1 : start + 8].tolist()
    assert batch.valid_tokens == 999
    (tmp_path / "odd.bin").write_bytes(b"abc")
    for name, message in [
        ("odd.bin", "3 bytes, which are not uint16 ids"),
        ("no.bin", "not a file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_data(DataConfig(name="bin", path=str(tmp_path / name)), seed=0, seq_len=8)


def named(names):
    return [{name: torch.full((2,), number) for number, name in enumerate(names)}]


def test_labels_next_to_targets_are_model_inputs():
    config = DataConfig(name="custom", target="test_custom_parts:named")
    config.arguments = {"names": ["y", "x", "target"]}
    batch = open_data(config, seed=0).train.read([0])
    assert (sorted(batch.inputs), batch.targets.tolist()) == (["x", "y"], [[2, 2]])
    config.arguments = {"names": ["y", "labels"]}
    with pytest.raises(ConfigError, match="labels and y: which are the targets"):
        open_data(config, seed=0)


@pytest.mark.parametrize(
    ("built", "message"),
    [
        ("builtins:dict", "a data set without samples"),
        ("builtins:object", "TypeError: object of type 'object' has no len"),
        ("no.such:module", "cannot be imported"),
    ],
)
def test_invalid_data_set_gives_one_message(built, message):
    with pytest.raises(ConfigError, match=message):
        open_data(DataConfig(name="custom", target=built), seed=0)
