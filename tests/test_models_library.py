"""Models of third parties: Hugging Face's, and torch's own transformer, equal their single-process
runs on every layout.
"""

import json
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
import torch.nn.functional as F
import training
from torch import nn

import parallel2d
from parallel2d.base.config import HuggingFaceModel, TrainConfig
from parallel2d.base.errors import ConfigError
from parallel2d.models import huggingface
from parallel2d.parallel.gradients import clip_gradient_norm
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.weights.initial_values import InitialWeights
from parallel2d.parallel.weights.pretrained import load_pretrained
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.model_families import (
    _configured_plan,
    _library_plan,
    build_model,
    plan_tensor_axis,
)

LIBRARY = pytest.mark.extras("transformers")
HEADS = {
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
}
GROUPED = {**HEADS, "num_key_value_heads": 2, "vocab_size": 31, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 4},
    "mixtral": {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"},
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    "phi3": {**GROUPED, "bos_token_id": 1, "eos_token_id": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 31, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
             "bos_token_id": 0, "eos_token_id": 0},
    "bert": {**HEADS, "vocab_size": 31, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {**HEADS, "image_size": 8, "patch_size": 4, "num_labels": 5},
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 31,
        "dropout_rate": 0.0},
}  # fmt: skip
BATCH, STEPS = 8, 3


class Translator(nn.Module):
    """torch's own encoder and decoder between an embedding and a head, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.body = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 31)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 2.0)

    def forward(self, input_ids, decoder_input_ids):
        x = self.body(self.embedding(input_ids), self.embedding(decoder_input_ids))
        return self.scale * self.head(x)


def build(kind: str, **changes: Any) -> nn.Module:
    if kind == "transformer":
        return Translator()
    return huggingface.build(architecture=kind, arguments={**MODELS[kind], **changes})


def batch(kind: str, step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs by name and targets of a complete global batch."""
    generator = torch.Generator().manual_seed(step)
    if kind == "vit":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images}, torch.randint(5, (BATCH,), generator=generator)
    tokens = torch.randint(1, 31, (BATCH, 9), generator=generator)
    if kind in ("t5", "transformer"):
        other = torch.randint(1, 31, (BATCH, 7), generator=generator)
        return {"input_ids": tokens, "decoder_input_ids": other[:, :-1]}, other[:, 1:]
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_of(
    model: nn.Module, inputs: dict[str, torch.Tensor], targets: torch.Tensor
) -> torch.Tensor:
    output = model(**inputs)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def run(
    kind: str, sizes: dict[str, int], config: dict[str, Any], changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Losses, norms and final weights on this process group; on a single rank without any of our
    code in the loop.
    """
    alone = torch.distributed.get_world_size() == 1
    parallel = parallel2d.ParallelConfig(precision="fp64", **config)
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**sizes), parallel.strategy.name)
    with parallel2d.build_on_meta():
        model = build(kind, **(changes or {}))
    names = list(dict(model.named_parameters()))
    plan = huggingface.tensor_words(model) if parallel2d.mesh_shape(mesh).tensor > 1 else None
    if alone:
        model = _initial(kind, changes)
    else:
        model = parallel2d.parallelize(model, mesh, parallel, seed=5, tensor_plan=plan)
    assert list(dict(model.named_parameters())) == names
    rank, count = parallel2d.data_coordinate(mesh), parallel2d.mesh_shape(mesh).data_ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batch(kind, step)
        own = {key: value.chunk(count)[rank] for key, value in inputs.items()}
        loss = loss_of(model, own, targets.chunk(count)[rank])
        loss.backward()
        if alone:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        else:
            norms.append(clip_gradient_norm(model.parameters(), 1.0).item())
            torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {n: training.full_tensor_of(p).detach() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def _initial(kind: str, changes: dict[str, Any] | None) -> nn.Module:
    with parallel2d.build_on_meta():
        model = build(kind, **(changes or {}))
    InitialWeights(model, find_blocks(model), None).write(model, 5, "cpu")
    return model.double()


@lru_cache
def expected(ranks: Any, kind: str, tied: bool | None = None) -> dict[str, Any]:
    changes = None if tied is None else {"tie_word_embeddings": tied}
    return ranks.run(1, run, kind, {}, {}, changes)[0]


def compare(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-9, abs=0)
    assert found["norms"] == pytest.approx(reference["norms"], rel=1e-7, abs=0)
    assert found["weights"].keys() == reference["weights"].keys()
    for name, value in reference["weights"].items():
        assert (found["weights"][name] - value).abs().max() < 1e-10, name


# Each strategy sees every second kind.
ON_EACH = [
    pytest.param(
        ("zero3", "hybrid")[number % 2], kind, marks=[] if kind == "transformer" else LIBRARY
    )
    for number, kind in enumerate((*MODELS, "transformer"))
]


@pytest.mark.parametrize(("strategy", "kind"), ON_EACH)
def test_a_library_model_equals_its_single_process_run(ranks, kind, strategy):
    world = 4 if strategy == "hybrid" else 2
    compare(ranks.run(world, run, kind, {}, {"strategy": strategy})[0], expected(ranks, kind))


CONSTRUCTED = {
    "openai-gpt": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 31, "n_positions": 8},
    "apertus": GROUPED,
}


def differing_from_constructor(kind: str) -> list[str]:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **CONSTRUCTED[kind])
    build = transformers.AutoModelForCausalLM.from_config
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(replicate=2, shard=2), "hybrid")
    with parallel2d.build_on_meta():
        model = build(config)
    model = parallel2d.parallelize(model, mesh, parallel2d.ParallelConfig("hybrid"), seed=5)
    state = parallel2d.full_state(model, rank0_only=False)["model"]
    torch.manual_seed(5)
    expected = build(config).state_dict()
    assert state.keys() <= expected.keys()
    return [name for name, value in state.items() if not torch.equal(value, expected[name])]


@LIBRARY
@pytest.mark.parametrize("kind", CONSTRUCTED)
def test_parameters_that_only_a_library_constructor_sets_equal_one_process(ranks, kind):
    assert ranks.run(4, differing_from_constructor, kind) == [[]] * 4


@LIBRARY
@pytest.mark.parametrize(
    ("kind", "strategy", "tied"),
    [
        ("qwen3", "hybrid", None),
        ("mixtral", "hybrid", None),
        ("phi3", "hybrid", None),
        ("llama", "zero3", True),
    ],
)
def test_tensor_parallel_plan_of_a_library_model_gives_equal_results(ranks, kind, strategy, tied):
    changes = None if tied is None else {"tie_word_embeddings": tied}
    found = ranks.run(4, run, kind, {"tensor": 2}, {"strategy": strategy}, changes)[0]
    compare(found, expected(ranks, kind, tied))


@LIBRARY
def test_unknown_plan_entry_is_refused_only_with_a_tensor_axis():
    model = huggingface.build(architecture="llama", arguments=MODELS["llama"])
    model._tp_plan = {"model.layers.*.mlp.up_proj": "sideways"}
    parts = SimpleNamespace(module=model, tensor_plan=_library_plan)
    config = TrainConfig(model=HuggingFaceModel())
    assert plan_tensor_axis(TrainConfig(), parts, 1) is None
    says = "up_proj: sideways, which is not translated; set model.tensor_plan="
    with pytest.raises(ConfigError, match=says):
        plan_tensor_axis(config, parts, 2)
    parts.tensor_plan = _configured_plan({"model.layers.*.mlp.up_proj": "replicate"})
    assert plan_tensor_axis(config, parts, 2)


def _saved(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return build(kind)


def _from_folder(path: str, sizes: dict[str, int], kind: str) -> list[bool]:
    parts = build_model(HuggingFaceModel(path=path))
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**sizes), "hybrid")
    plan = parts.tensor_plan(parts.module, 2) if sizes and parts.tensor_plan is not None else None
    given = {"tensor_plan": plan, "weights": parts.weights}
    model = parallel2d.parallelize(
        parts.module, mesh, parallel2d.ParallelConfig("hybrid"), seed=0, **given
    )
    saved = _saved(kind).state_dict()
    return [
        torch.equal(training.full_tensor_of(p), saved[name]) for name, p in model.named_parameters()
    ]


@LIBRARY
@pytest.mark.parametrize(
    ("kind", "sizes", "files"),
    [
        ("gpt2", {}, 1),
        ("llama", {}, 4),
        ("mixtral", {"tensor": 2}, 8),  # stored expert by expert, computed as one tensor
    ],
)
def test_every_rank_reads_its_pretrained_weights(ranks, tmp_path, kind, sizes, files):
    _saved(kind).save_pretrained(tmp_path, max_shard_size="5GB" if files == 1 else "6KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert (tmp_path / "model.safetensors.index.json").exists() == (files > 1)
    for same in ranks.run(4, _from_folder, str(tmp_path), sizes, kind):
        assert same
        assert all(same)


def _empty(kind: str, **changes: Any) -> nn.Module:
    with parallel2d.build_on_meta():
        model = build(kind, **changes)
    return model.to_empty(device="cpu")


@LIBRARY
def test_folder_of_symlinks_is_read_and_paths_in_its_index_are_refused(tmp_path):
    blobs, links = tmp_path / "blobs", tmp_path / "snapshot"
    saved = _saved("llama")
    saved.save_pretrained(blobs, max_shard_size="8KB")
    links.mkdir()
    for path in blobs.iterdir():
        (links / path.name).symlink_to(f"../blobs/{path.name}")
    model = _empty("llama")
    assert load_pretrained(model, str(links)) == set(saved.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name]), name
    outside = json.dumps({"weight_map": {"lm_head.weight": "../blobs/model.safetensors"}})
    (links / "model.safetensors.index.json").unlink()
    (links / "model.safetensors.index.json").write_text(outside)
    with pytest.raises(ConfigError, match="is a path, not the name of a file in the folder"):
        load_pretrained(model, str(links))


@LIBRARY
def test_weight_format_without_partial_reads_is_refused(tmp_path, monkeypatch):
    from safetensors.torch import save_file
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    stored, computed = "mlp.down.weight", "mlp.down_proj.weight"
    rule = WeightConverter([stored], [computed], operations=[Transpose(0, 1)])
    state = _saved("llama").state_dict().items()
    saved = {name.replace(computed, stored): value.clone() for name, value in state}
    save_file(saved, tmp_path / "model.safetensors")
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _model: [rule])
    says = r"down_proj.weight is stored in a form that cannot be read in parts \(Transpose of 1\)"
    with pytest.raises(ConfigError, match=says):
        load_pretrained(_empty("llama"), str(tmp_path))


@LIBRARY
def test_a_new_head_is_drawn_and_a_missing_layer_is_an_error(tmp_path):
    base = build("bert")
    base.bert.save_pretrained(tmp_path)
    model = _empty("bert")
    found = load_pretrained(model, str(tmp_path))
    dense, same = (each.bert.encoder.layer[0].output.dense for each in (model, base))
    assert torch.equal(dense.weight, same.weight)
    assert "cls.predictions.transform.dense.weight" not in found
    says = r"does not fit BertForMaskedLM: bert.encoder.layer.2.* is missing"
    with pytest.raises(ConfigError, match=says):
        load_pretrained(_empty("bert", num_hidden_layers=3), str(tmp_path))


@LIBRARY
@pytest.mark.parametrize(("given", "message"), [
    ({"architecture": "lama"}, "has no architecture 'lama'; near: ['llama"),
    ({"architecture": "llama", "arguments": {"hidden": 3}}, "LlamaConfig has no hidden; it has"),
    ({"architecture": "gpt2", "head": "seq2seq_lm"},
        "gpt2 has no seq2seq_lm model in transformers; it has causal_lm"),
    ({"path": "/nowhere"}, "/nowhere holds no config.json"),
    ({"architecture": "llama", "arguments": {"num_hidden_layers": 10**9}},
        "num_hidden_layers=1000000000 is more than 10,000 layers"),
    ({"architecture": "t5", "arguments": {"num_decoder_layers": 10**9}},
        "num_decoder_layers=1000000000 is more than 10,000 layers"),
    ({"architecture": "t5", "head": "base"},
        "T5Model is not a sequence-to-sequence language model; set model.head=seq2seq_lm"),
])  # fmt: skip
def test_invalid_library_model_gives_one_clear_error(given, message):
    with pytest.raises(ConfigError) as error:
        build_model(HuggingFaceModel(**given))
    assert message in str(error.value)


@LIBRARY
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["pipeline"]}, "pipeline is not a model class of transformers"),
        ({"architectures": ["Mine", "GPT2Model"]}, "Mine is not a model class of transformers"),
        ({"architectures": ["PreTrainedModel"]}, "PreTrainedModel is not a model class"),
        (
            {"architectures": ["PreTrainedConfig"]},
            "choose the head with model.head, one of seq2seq_lm",
        ),
        (
            {"backbone": "someone/model"},
            "backbone=someone/model stands for code, files or parts of other libraries",
        ),
        (
            {"text_config": {"_attn_implementation": "a/b"}},
            "_attn_implementation=a/b stands for code",
        ),
        ({"num_labels": 10**9}, "num_labels=1000000000 is more than 10,000,000 labels"),
        ({"depths": [10**6] * 4}, "is more than 10,000 layers"),
        ({"num_local_experts": 10**7}, "is more than 65,536 modules"),
    ],
)
def test_untrusted_folder_builds_only_a_model(tmp_path, change, message):
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 8,
        "n_head": 2,
        "n_layer": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
    config = HuggingFaceModel(path=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        build_model(config)
    assert message in str(error.value)


@LIBRARY
def test_an_encoder_decoder_learns_to_continue_the_prefix():
    parts = build_model(HuggingFaceModel(architecture="t5", arguments=MODELS["t5"]))
    plain = _initial("t5", None)
    parts.module.to_empty(device="cpu").double().load_state_dict(plain.state_dict())
    tokens, targets = torch.randint(1, 31, (3, 9)), torch.randint(1, 31, (3, 9))
    targets[1, 5:] = targets[2] = -100
    later = F.pad(tokens[:, 4:], (1, 0), value=0)
    logits = plain(input_ids=tokens[:, :4], decoder_input_ids=later).logits
    assert torch.equal(parts.module(tokens).logits, logits)
    assert parts.context(9) == 3
    expected = F.cross_entropy(logits.flatten(0, 1), targets[:, 3:].flatten(), reduction="sum")
    config = jobs.config_of(["model=hf", "model.architecture=t5", "train.seq_len=9"])
    found = ModelLoss(config, parts).value(parts.module, tokens, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    changed = tokens.clone()
    changed[:, 6:] = 1  # later tokens have no part in the prediction
    assert torch.equal(parts.module(changed).logits[:, :3], logits[:, :3])


@LIBRARY
def test_encoder_decoder_has_equal_losses_on_every_layout(ranks, folder):
    sizes = {**MODELS["t5"], "vocab_size": 260}
    words = ["model=hf", "model.architecture=t5", "checkpoint.enabled=false", "train.seq_len=15"]
    words += [f"++model.arguments.{key}={value}" for key, value in sizes.items()]
    found = {}
    for strategy, world in (("ddp", 1), ("hybrid", 4)):
        given = [*words, f"strategy={strategy}"]
        ranks.run(world, jobs.run, str(folder), str(folder / strategy), given, 4)
        found[strategy] = jobs.rows(folder / strategy)
    for row, alone in zip(found["hybrid"], found["ddp"], strict=True):
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-10, abs=0)
        assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-9, abs=0)
    # 15 - 15 // 2 + 1 of a sequence
    assert [row["tokens"] for row in found["hybrid"]] == [16 * 9 * step for step in range(1, 5)]
    assert found["ddp"][-1]["loss"] < found["ddp"][0]["loss"]


def guide(heading, **names):
    """Runs the lines that docs/models.md gives below a heading; the names that they leave."""
    text = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    (lines,) = re.findall(rf"### {heading}.*?```python\n(.*?)```", text, re.DOTALL)
    exec(lines, names)
    return names


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'pip install "parallel2d\[hf\]"'):
        build_model(HuggingFaceModel(architecture="llama"))


@LIBRARY
def test_pickled_weights_are_not_read(tmp_path):
    build("llama").config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="a pickle can run code, so it is not read"):
        build_model(HuggingFaceModel(path=str(tmp_path)))
