"""LoRA adapters of the ``peft`` library: equal training on every layout, with an unchanged base,
and exports for the library.
"""

import json
import math
import re
import sys

import jobs
import pytest
import torch
from test_checkpoint_hostile import reseal
from test_library_export import drawn, drawn_and_saved, loaded, logits
from test_models_library import MODELS, guide

from parallel2d import build_on_meta
from parallel2d.base.config import HuggingFaceModel
from parallel2d.base.errors import ConfigError
from parallel2d.checkpoint import main
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.weights.initial_values import InitialWeights
from parallel2d.training.checkpoint import Checkpoint
from parallel2d.training.model_families import build_model

pytestmark = pytest.mark.extras("peft")
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
WORDS = "{r: 4, lora_alpha: 16, target_modules: [q_proj, v_proj]}"
VOCAB = 260  # of bytes


def save_base(folder, kind="llama", **changes):
    arguments = {**MODELS[kind], "vocab_size": VOCAB, **changes}
    drawn(architecture=kind, arguments=arguments).save_pretrained(folder / "base")
    return str(folder / "base")


def train(ranks, folder, name, world, words, adapter=WORDS, steps=4, after_step=None):
    """The rows of a job of some steps that adapts the model in ``folder``/base."""
    model = ["model=hf", f"model.path={folder / 'base'}", f"model.adapter={adapter}"]
    words = [*model, "optimizer.lr=1e-2", "train.seq_len=15", *words]
    ranks.run(world, jobs.run, str(folder), str(folder / name), words, steps, after_step)
    return jobs.rows(folder / name)


def same(rows, expected, bound=1e-10):
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=bound, abs=0)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=100 * bound, abs=0)


def only_adapters_are_trained(trainer):
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert set(map(id, trainer.optimizer.state)) <= set(map(id, held))
    assert len(held) == 2 * 2 * 2  # two layers, two modules, two factors
    assert sum(p.numel() for p in held) == 2 * 4 * (16 + 16 + 16 + 8)


OTHERS = ("activation_checkpointing=full", "bucketing=layer", "train.micro_batch_size=2")


@pytest.mark.parametrize(("strategy", "others"), [("hybrid", ()), ("hybrid_full", OTHERS)])
def test_only_adapter_parameters_train_and_every_layout_gives_equal_losses(
    ranks, folder, strategy, others
):
    save_base(folder)
    check = only_adapters_are_trained
    alone = train(ranks, folder, "alone", 1, ["strategy=ddp"], after_step=check)
    rows = train(ranks, folder, "run", 4, [f"strategy={strategy}", *others], after_step=check)
    same(rows, alone)
    stored = Checkpoint.open(str(folder / "run" / "checkpoints" / "step-00000004"))
    moved = [name for name in stored.tensors if re.match(r"model/.*lora_B", name)]
    assert len(moved) == 4
    assert all(stored.read(name).abs().max() > 1e-3 for name in moved)  # from zero
    assert len([name for name in stored.tensors if name.startswith("optimizer/exp_avg/")]) == 8
    assert all("lora_" in name for name in stored.tensors if name.startswith("optimizer/"))
    if strategy == "hybrid":
        elements = 2 * 4 * (16 + 16 + 16 + 8)
        # two replicas of two shards, in fp64: 2 (R - 1) / R of a shard
        assert rows[-1]["comm/replicate/bytes"] == pytest.approx(elements / 2 * 8, rel=0.01)


def initial(path, adapter, seed=0):
    parts = build_model(HuggingFaceModel(path=path, adapter=adapter))
    model = parts.module
    plan = InitialWeights(model, find_blocks(model), None)
    for name, parameter in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        empty = torch.full_like(parameter, math.nan, device="cpu")
        unset = torch.nn.Parameter(empty, parameter.requires_grad)
        setattr(model.get_submodule(owner), key, unset)
    given = parts.weights(model)
    plan.write(model, seed, "cpu", given=given)
    return model, given


@pytest.mark.parametrize("rule", [True, "gaussian"])
def test_initial_adapter_values_equal_peft_and_the_saved_folder(tmp_path, rule):
    path, adapter = save_base(tmp_path), {**LORA, "init_lora_weights": rule}
    model, given = initial(path, adapter)
    base = loaded(path, "llama").state_dict()
    found = model.state_dict()
    for name, value in base.items():
        adapted = re.sub(r"(q|v)_proj\.weight", r"\1_proj.base_layer.weight", name)
        assert torch.equal(found[f"base_model.model.{adapted}"], value), name
    assert len(given) == len(base)
    others = [value for name, value in found.items() if "lora_B" in name]
    assert not any(map(torch.count_nonzero, others))

    def factors(seed):
        values = initial(path, adapter, seed)[0].state_dict().items()
        return torch.cat([value.flatten() for name, value in values if "lora_A" in name])

    drawn_values = factors(0)
    assert len(drawn_values.unique()) > 0.9 * len(drawn_values)  # no two layers draw the same
    if rule is True:
        # kaiming_uniform_(a=sqrt(5)) of 16 inputs
        assert 0.2 < drawn_values.abs().max() <= 0.25
        assert drawn_values.std().item() == pytest.approx(0.25 / math.sqrt(3), rel=0.1)
    else:
        assert drawn_values.std().item() == pytest.approx(1 / 4, rel=0.15)
        assert drawn_values.abs().max() > 0.5
    assert torch.equal(factors(0), drawn_values)
    assert not torch.equal(factors(1), drawn_values)


def trained_model(folder, kind, adapter):
    assert main(["convert", str(folder / "run"), str(folder / "plain.pt")]) == 0
    parts = build_model(HuggingFaceModel(path=str(folder / "base"), adapter=adapter))
    model = parts.module.to_empty(device="cpu")
    fresh = loaded(folder / "base", kind)
    for name, buffer in fresh.named_buffers():
        model.base_model.model.get_buffer(name).copy_(buffer)
    model.load_state_dict(torch.load(folder / "plain.pt", weights_only=True))
    return model


def exported(folder, kind):
    """Load the adapter of a run on the base with the library only."""
    from peft import PeftModel

    assert main(["convert", str(folder / "run"), str(folder / "adapter"), "--to", "peft"]) == 0
    names = sorted(path.name for path in (folder / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    base = loaded(folder / "base", kind)
    return PeftModel.from_pretrained(base, folder / "adapter")


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("gpt2", "{r: 4, target_modules: [c_attn], init_lora_weights: gaussian}"),
        ("mixtral", "{r: 4, target_modules: [q_proj], use_rslora: true}"),
        ("gpt2", "{r: 4, target_modules: [c_attn], use_dora: true, bias: all}"),
        ("phi3", "{r: 2, target_modules: all-linear, use_dora: true, use_rslora: true}"),
        ("llama", "{r: 2, target_modules: all-linear, modules_to_save: [lm_head]}"),
        ("llama", "{r: 2, target_modules: [embed_tokens, q_proj]}"),
    ],
)
def test_exported_adapter_loads_in_peft_with_equal_logits(ranks, folder, kind, adapter):
    from omegaconf import OmegaConf
    from safetensors.torch import load_file

    save_base(folder, kind)
    # The library computes experts in fp32 at most.
    words = ["strategy=hybrid", "train.seq_len=8", "precision=fp32"]
    # Replicas that average now and then have an outer adapter.
    diloco = ["sync=diloco", "sync.every=2"] if kind == "gpt2" else []
    # The head is a copy that the library trains in place of the base's.
    chunked = ["train.loss_chunk=5"] if "lm_head" in adapter else []
    rows = train(ranks, folder, "run", 4, [*words, *diloco, *chunked], adapter)
    assert rows[-1]["loss"] != rows[0]["loss"]
    before = logits(loaded(folder / "base", kind), kind)
    found = exported(folder, kind)
    model = trained_model(folder, kind, OmegaConf.to_container(OmegaConf.create(adapter)))
    after = logits(found, kind)
    assert torch.equal(after, logits(model, kind))
    assert (after - before).abs().max() > 1e-6
    model.save_pretrained(folder / "theirs", save_embedding_layers=False)
    folders = (folder / "adapter", folder / "theirs")
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in folders)
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    config, expected = (json.loads((each / "adapter_config.json").read_text()) for each in folders)
    assert not config.pop("auto_mapping")
    expected.pop("auto_mapping")
    for key in ("target_modules", "modules_to_save", "target_parameters"):
        assert sorted(config.pop(key) or []) == sorted(expected.pop(key, None) or [])
    assert config == expected
    assert config["base_model_name_or_path"] == str(folder / "base")


DORA = "{r: 4, lora_alpha: 16, target_modules: [q_proj, v_proj], use_dora: true, bias: lora_only}"


def dora_is_trained(trainer):
    """A magnitude and a bias of each adapted layer are trained, and biases of the others are not."""
    for name, parameter in trainer.model.named_parameters():
        is_adapted = "lora_" in name or name.endswith("base_layer.bias")
        assert parameter.requires_grad == is_adapted, name
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(held) == 2 * 2 * 4


@pytest.mark.parametrize("strategy", ["hybrid", "zero3", "ddp", "hybrid_full"])
def test_dora_and_trained_biases_equal_one_process_and_resume_elsewhere(ranks, folder, strategy):
    save_base(folder, attention_bias=True)
    alone = train(ranks, folder, "alone", 1, ["strategy=ddp"], DORA, 6, dora_is_trained)
    words = [f"strategy={strategy}", "activation_checkpointing=full"]
    train(ranks, folder, "run", 4, words, DORA, 4, dora_is_trained)
    same(train(ranks, folder, "run", 2, ["strategy=hybrid"], DORA, 2), alone)
    folders = [folder / "run" / "checkpoints" / f"step-{step:08d}" for step in (2, 4)]
    early, late = (Checkpoint.open(str(each)) for each in folders)
    trained = [name for name in late.tensors if re.match(r"model/.*(magnitude|layer.bias)", name)]
    assert len(trained) == 8
    for name in trained:
        assert not torch.equal(early.read(name), late.read(name)), name


def test_initial_magnitudes_equal_peft(tmp_path):
    path, adapter = save_base(tmp_path), {**LORA, "use_dora": True}
    found = initial(path, adapter)[0].state_dict()
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(loaded(path, "llama"), LoraConfig(**adapter)).state_dict()
    names = [name for name in theirs if "magnitude" in name]
    assert len(names) == 4
    for name in names:
        assert torch.equal(found[name], theirs[name]), name


def test_adapter_run_resumes_on_another_layout(ranks, folder):
    save_base(folder)
    whole = train(ranks, folder, "whole", 1, ["strategy=ddp"], steps=6)
    train(ranks, folder, "run", 4, ["strategy=hybrid"], steps=4)
    same(train(ranks, folder, "run", 2, ["strategy=hybrid_full"], steps=2), whole)


REFUSED = [
    ({"rank": 4}, "rank: an adapter is LoRA with r, lora_alpha,"),
    ({"r": 0}, "r=0 must be a whole number of at least 1"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa must be true or gaussian"),
    (
        {"use_dora": True, "target_modules": ["embed_tokens"]},
        "is of Embedding, and must be a Linear",
    ),
    ({"bias": "some"}, "bias=some must be none, all or lora_only"),
    ({"target_modules": ["nothing"]}, "Target modules {'nothing'} not found in the base model"),
    ({}, 'pip install "parallel2d[peft]"'),  # without the library
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_invalid_adapter_settings_give_one_message(tmp_path, monkeypatch, changes, message):
    path = save_base(tmp_path)
    if not changes:
        monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError) as error:
        build_model(HuggingFaceModel(path=path, adapter={**LORA, **changes}))
    assert message in str(error.value)


def test_adapter_without_pretrained_weights_is_refused(tmp_path):
    drawn(architecture="llama", arguments=MODELS["llama"]).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds no weights to adapt"):
        build_model(HuggingFaceModel(path=str(tmp_path), adapter=LORA))


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path, capsys):
    _, checkpoint = drawn_and_saved(tmp_path / "run", "llama")
    assert main(["convert", checkpoint, str(tmp_path / "out"), "--to", "peft"]) == 1
    assert "the checkpoint names the adapters []" in capsys.readouterr().err


PLANTED = [
    ({"peft_type": "IA3"}, "peft_type=IA3: only LORA is converted"),
    ({"use_qalora": True}, "use_qalora=True: adapters of this kind"),
    ({"megatron_core": "os", "megatron_config": {"a": 1}}, "megatron_co"),
    ({"r": "4"}, "r=4 must be a whole number"),
    ({"own": 1}, "own=1: adapters of this kind"),
]


def test_a_configuration_in_a_checkpoint_is_checked(ranks, folder, capsys):
    save_base(folder)
    train(ranks, folder, "run", 1, ["strategy=ddp"], steps=2)
    victim = folder / "run" / "checkpoints" / "step-00000002"
    original = (victim / "manifest.json").read_bytes()
    for changes, message in PLANTED:
        reseal(
            victim,
            lambda told, changes=changes: told["layout"]["adapters"]["default"].update(changes),
        )
        assert main(["convert", str(victim), str(folder / "out"), "--to", "peft"]) == 1
        assert message in capsys.readouterr().err
        (victim / "manifest.json").write_bytes(original)
    plant = {"auto_mapping": {"base_model_class": "system", "parent_library": "os"}}
    reseal(victim, lambda manifest: manifest["layout"]["adapters"]["default"].update(plant))
    assert main(["convert", str(victim), str(folder / "out"), "--to", "peft"]) == 0
    assert "system" not in (folder / "out" / "adapter_config.json").read_text()
    assert main(["convert", str(victim), str(folder / "merged"), "--to", "hf"]) == 1
    assert "--to peft writes them" in capsys.readouterr().err


def own_adapted(**changes):
    """A custom factory: a peft model with a base initialized from the seed."""
    import peft

    from parallel2d.models import huggingface

    arguments = {**MODELS["llama"], "vocab_size": VOCAB}
    base = huggingface.build(architecture="llama", arguments=arguments)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **{**LORA, **changes})
    return peft.get_peft_model(base, settings)


def test_custom_peft_model_is_trained_and_saved(ranks, folder):
    from safetensors.torch import load_file

    words = ["model=custom", "model.target=test_adapters:own_adapted", "optimizer.lr=1e-2"]
    for name, world, strategy in [("alone", 1, "ddp"), ("run", 4, "hybrid")]:
        given = [*words, "train.seq_len=15", f"strategy={strategy}"]
        arguments = (str(folder), str(folder / name), given, 4, only_adapters_are_trained)
        ranks.run(world, jobs.run, *arguments)
    same(jobs.rows(folder / "run"), jobs.rows(folder / "alone"))
    assert main(["convert", str(folder / "run"), str(folder / "adapter"), "--to", "peft"]) == 0
    assert len(load_file(folder / "adapter" / "adapter_model.safetensors")) == 8
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["task_type"]) == (4, "CAUSAL_LM")


def test_adapter_initialization_from_base_weights_is_refused_on_meta():
    with build_on_meta():
        model = own_adapted(use_dora=True)
    plan = InitialWeights(model, find_blocks(model), None)
    with pytest.raises(ConfigError, match="use_dora=True are computed from the base's weights"):
        plan.write(model, 0, "cpu")


def _lines_of_the_guide(base):
    model = guide("Adapters", BASE=base)["model"]
    return {n: p.requires_grad for n, p in model.named_parameters()}


def test_guide_snippet_shards_an_adapted_model(ranks, tmp_path):
    for found in ranks.run(4, _lines_of_the_guide, save_base(tmp_path)):
        assert sum(found.values()) == 8
        assert all(("lora_" in name) == trained for name, trained in found.items())
