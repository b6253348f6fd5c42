"""Models that nobody here wrote: Hugging Face's, and torch's own transformer, equal their single-process runs on every layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from torch import nn

from parallel2d import MeshSpec, ParallelConfig, build_mesh, build_on_meta, data_coordinate, mesh_shape, parallelize
from parallel2d.config import ConfigError, HuggingFaceModel
from parallel2d.gradients import clip_gradient_norm
from parallel2d.model import build_model
from parallel2d.models import huggingface

pytest.importorskip("transformers")

HEADS = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
GROUPED = {**HEADS, "num_key_value_heads": 2, "vocab_size": 31, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 4},
    "mixtral": {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 31, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
             "bos_token_id": 0, "eos_token_id": 0},
    "bert": {**HEADS, "vocab_size": 31, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {**HEADS, "image_size": 8, "patch_size": 4, "num_labels": 5},
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 31, "dropout_rate": 0.0},
}  # fmt: skip
BATCH, STEPS = 8, 3


class Translator(nn.Module):
    """torch's own encoder and decoder between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.body = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, input_ids, decoder_input_ids):
        return self.head(self.body(self.embedding(input_ids), self.embedding(decoder_input_ids)))


def build(kind: str, **changes: Any) -> nn.Module:
    if kind == "transformer":
        return Translator()
    return huggingface.build(architecture=kind, arguments={**MODELS[kind], **changes})


def batch(kind: str, step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs by name and targets, of a whole global batch."""
    generator = torch.Generator().manual_seed(step)
    if kind == "vit":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images}, torch.randint(5, (BATCH,), generator=generator)
    tokens = torch.randint(1, 31, (BATCH, 9), generator=generator)
    if kind in ("t5", "transformer"):
        other = torch.randint(1, 31, (BATCH, 7), generator=generator)
        return {"input_ids": tokens, "decoder_input_ids": other[:, :-1]}, other[:, 1:]
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    output = model(**inputs)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def run(kind: str, sizes: dict[str, int], config: dict[str, Any], changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Losses, norms and final weights on this process group; on a single rank without any of our code in the loop."""
    alone = torch.distributed.get_world_size() == 1
    parallel = ParallelConfig(precision="fp64", **config)
    mesh = build_mesh(MeshSpec(**sizes), parallel.resolved().strategy.name)
    with build_on_meta():
        model = build(kind, **(changes or {}))
    names = list(dict(model.named_parameters()))
    plan = huggingface.tensor_words(model) if mesh_shape(mesh).tensor > 1 else None
    model = _initial(kind, changes) if alone else parallelize(model, mesh, parallel, seed=5, tensor_plan=plan)
    assert list(dict(model.named_parameters())) == names
    rank, count = data_coordinate(mesh), mesh_shape(mesh).data_ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batch(kind, step)
        inputs, targets = {key: value.chunk(count)[rank] for key, value in inputs.items()}, targets.chunk(count)[rank]
        loss = loss_of(model, inputs, targets)
        loss.backward()
        if alone:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        else:
            norms.append(clip_gradient_norm(model.parameters(), 1.0).item())
            torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: training.whole(p).detach() for n, p in model.named_parameters()}}


def _initial(kind: str, changes: dict[str, Any] | None) -> nn.Module:
    from parallel2d.parallelize.initialization import plan_weights
    from parallel2d.parallelize.structure import find_blocks

    with build_on_meta():
        model = build(kind, **(changes or {}))
    plan_weights(model, find_blocks(model), None).write(model, 5, "cpu")
    return model.double()


@lru_cache
def expected(ranks: Any, kind: str, tied: bool | None = None) -> dict[str, Any]:
    return ranks.run(1, run, kind, {}, {}, None if tied is None else {"tie_word_embeddings": tied})[0]


def compare(found: dict[str, Any], reference: dict[str, Any], bound: float = 1e-9) -> None:
    assert found["losses"] == pytest.approx(reference["losses"], rel=bound, abs=0)
    assert found["norms"] == pytest.approx(reference["norms"], rel=100 * bound, abs=0)
    assert found["weights"].keys() == reference["weights"].keys()
    for name, value in reference["weights"].items():
        assert (found["weights"][name] - value).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", [*MODELS, "transformer"])
@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
def test_a_library_model_equals_its_single_process_run(ranks, kind, strategy):
    compare(ranks.run(4, run, kind, {}, {"strategy": strategy})[0], expected(ranks, kind))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_the_plan_that_a_library_model_ships_changes_nothing(ranks, kind):
    compare(ranks.run(4, run, kind, {"tensor": 2}, {"strategy": "hybrid"})[0], expected(ranks, kind))


def test_tied_embeddings_of_a_library_model_are_split_together(ranks):
    tied = ranks.run(4, run, "llama", {"tensor": 2}, {"strategy": "zero3"}, {"tie_word_embeddings": True})[0]
    compare(tied, expected(ranks, "llama", True))


def _from_folder(path: str, sizes: dict[str, int], architecture: str) -> list[bool]:
    parts = build_model(HuggingFaceModel(path=path))
    mesh = build_mesh(MeshSpec(**sizes), "hybrid")
    plan = parts.tensor_plan(parts.module, 2) if sizes and parts.tensor_plan is not None else None
    model = parallelize(parts.module, mesh, ParallelConfig("hybrid"), seed=0, tensor_plan=plan, weights=parts.weights)
    import safetensors.torch

    saved = safetensors.torch.load_file(f"{path}/model.safetensors")
    return [torch.equal(training.whole(p), saved[name]) for name, p in model.named_parameters()]


@pytest.mark.parametrize(("kind", "sizes"), [("llama", {"tensor": 2}), ("gpt2", {})])
def test_pretrained_weights_are_read_by_every_rank_for_itself(ranks, tmp_path, kind, sizes):
    torch.manual_seed(3)
    model = build(kind)
    model.save_pretrained(tmp_path)
    for same in ranks.run(4, _from_folder, str(tmp_path), sizes, kind):
        assert same
        assert all(same)


def test_a_new_head_is_drawn_and_a_missing_layer_is_an_error(tmp_path):
    from parallel2d.weights import load_pretrained

    base = build("bert")
    base.bert.save_pretrained(tmp_path)
    with build_on_meta():
        model = build("bert")
    model = model.to_empty(device="cpu")
    found = load_pretrained(model, str(tmp_path))
    assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, base.bert.encoder.layer[0].output.dense.weight)
    assert "cls.predictions.transform.dense.weight" not in found
    with build_on_meta():
        deeper = build("bert", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"does not fit BertForMaskedLM: bert.encoder.layer.2.* is missing"):
        load_pretrained(deeper.to_empty(device="cpu"), str(tmp_path))


@pytest.mark.parametrize(("given", "message"), [
    ({"architecture": "lama"}, "has no architecture 'lama'; near: ['llama"),
    ({"architecture": "llama", "arguments": {"hidden": 3}}, "LlamaConfig has no hidden; it has"),
    ({"architecture": "gpt2", "head": "seq2seq_lm"}, "gpt2 has no seq2seq_lm model in transformers; it has causal_lm"),
    ({"path": "/nowhere"}, "/nowhere holds no config.json"),
    ({"architecture": "vit", "arguments": {"num_hidden_layers": 1}}, "ViTForImageClassification reads more than token ids"),
])  # fmt: skip
def test_a_library_model_that_cannot_be_built_is_one_clear_error(given, message):
    with pytest.raises(ConfigError) as error:
        build_model(HuggingFaceModel(**given))
    assert message in str(error.value)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'pip install "parallel2d\[hf\]"'):
        build_model(HuggingFaceModel(architecture="llama"))


def test_pickled_weights_are_not_read(tmp_path):
    build("llama").config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="a pickle can run code, so it is not read"):
        build_model(HuggingFaceModel(path=str(tmp_path)))
