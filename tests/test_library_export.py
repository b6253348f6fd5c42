"""A checkpoint of a model of the ``transformers`` library becomes a folder that the library loads
as it is, from any layout.
"""

import dataclasses
import json
from pathlib import Path

import jobs
import pytest
import torch
from test_checkpoint_convert import growth
from test_checkpoint_convert import save as save_checkpoint
from test_checkpoint_hostile import reseal
from test_models_library import LIBRARY, MODELS, batch

from parallel2d.base.config import HuggingFaceModel
from parallel2d.checkpoint import main
from parallel2d.models import huggingface

pytestmark = LIBRARY
AUTO = {
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def save(run, model, **settings):
    """The checkpoint of ``model``, as a run of these settings writes it."""
    layout = {"model": dataclasses.asdict(HuggingFaceModel(**settings))}
    return save_checkpoint(run, model, layout=layout)


def drawn_and_saved(run, kind, arguments=None):
    settings = {"architecture": kind, "arguments": arguments or MODELS[kind]}
    model = drawn(**settings)
    return model, save(run, model, **settings)


def drawn(**settings):
    torch.manual_seed(1)
    model = huggingface.build(**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def convert(*arguments):
    return main(["convert", *map(str, arguments), "--to", "hf"])


def loaded(folder, kind):
    import transformers

    auto = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM"))
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def logits(model, kind):
    inputs, _ = batch(kind, 0)
    if kind == "vit":
        inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
    with torch.no_grad():
        return model.eval()(**inputs).logits


def saved_keys(folder):
    from safetensors.torch import load_file

    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: value for content in files for name, value in content.items()}


def configuration(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in MODELS), ("llama", {"tie_word_embeddings": True})],
)
def test_export_has_the_files_of_save_pretrained(tmp_path, kind, changes):
    model, checkpoint = drawn_and_saved(tmp_path / "run", kind, {**MODELS[kind], **changes})
    assert convert(checkpoint, tmp_path / "out") == 0
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (saved_keys(tmp_path / name) for name in ("out", "theirs"))
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    config, expected = configuration(tmp_path / "out"), configuration(tmp_path / "theirs")
    for each in (config, expected):
        each.pop("use_cache", None)  # which training turns off
    assert config == expected
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("out", "theirs")]
    assert names[0] == names[1]
    assert torch.equal(logits(loaded(tmp_path / "out", kind), kind), logits(model, kind))


def words(texts):
    """Save a tokenizer.json of the library with a vocabulary of complete words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "EOS"]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    return tokenizer


CORPUS = [f"one plus {number} is more than {number}" for number in ("two", "three", "four")]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", ["strategy=zero3", "mesh.tensor=2"]),
        ("mixtral", ["strategy=hybrid_full"]),
    ],
)
def test_export_of_any_layout_loads_with_its_tokenizer(ranks, tmp_path, kind, layout):
    from transformers import AutoTokenizer

    arguments = {**MODELS[kind], "tie_word_embeddings": kind == "llama"}
    base = drawn(architecture=kind, arguments=arguments)
    base.save_pretrained(tmp_path / "base")
    run, tokenizer = tmp_path / "run", tmp_path / "words.json"
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS * 400))
    words(CORPUS).save(str(tokenizer))
    given = ["model=hf", "precision=fp32", f"model.path={tmp_path / 'base'}", *layout]
    given += [f"data.tokenizer={tokenizer}", "data.end_token=EOS", "data.validation_fraction=0"]
    ranks.run(4, jobs.run, str(tmp_path), str(run), given, 2)
    assert convert(run, tmp_path / "out") == 0
    # The trained weights, read without the conversion code.
    assert main(["convert", str(run), str(tmp_path / "plain.pt")]) == 0
    base.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    found = loaded(tmp_path / "out", kind)
    assert torch.equal(logits(found, kind), logits(base, kind))
    untrained = drawn(architecture=kind, arguments=arguments)
    assert not torch.equal(logits(base, kind), logits(untrained, kind))
    assert found.config.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(CORPUS[0])["input_ids"] == words(CORPUS).encode(CORPUS[0]).ids
    assert tokenizer.eos_token == "EOS"


def test_export_copies_other_files_of_the_model_folder(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    base = tmp_path / "base"
    arguments = {"vocab_size": 40, "rms_norm_eps": 1e-3}
    published = drawn(architecture="llama", arguments=MODELS["llama"])
    published.config.use_cache = True
    published.save_pretrained(base)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(base)
    PreTrainedTokenizerFast(tokenizer_object=words(CORPUS), unk_token="<unk>").save_pretrained(base)
    (base / "modeling_own.py").write_text("raise SystemExit")
    model = drawn(path=str(base), arguments=arguments)
    checkpoint = save(tmp_path / "run", model, path=str(base), arguments=arguments)
    assert convert(checkpoint, tmp_path / "out", "--dtype", "bf16", "--shard-gib", "0.000003") == 0
    found = loaded(tmp_path / "out", "llama")
    assert found.generation_config.temperature == 0.25
    assert (found.config.vocab_size, found.config.rms_norm_eps) == (40, 1e-3)
    assert found.config.use_cache
    assert found.dtype == torch.bfloat16
    assert configuration(tmp_path / "out")["dtype"] == "bfloat16"
    assert torch.equal(logits(found, "llama"), logits(model.bfloat16(), "llama"))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(CORPUS[1])["input_ids"]
    assert not list((tmp_path / "out").glob("*.py"))


def test_export_copies_the_tokenizer_of_the_run(tmp_path):
    from transformers import AutoTokenizer

    base, own = tmp_path / "base", tmp_path / "own.json"
    model = drawn(architecture="gpt2", arguments=MODELS["gpt2"])
    model.save_pretrained(base)
    words(CORPUS[:1]).save(str(base / "tokenizer.json"))
    words(CORPUS).save(str(own))
    checkpoint = save(tmp_path / "run", model, path=str(base))
    assert convert(checkpoint, tmp_path / "a") == 0
    reseal(Path(checkpoint), lambda told: told["layout"].update(tokenizer={"path": str(own)}))
    assert convert(checkpoint, tmp_path / "b") == 0
    chosen = f"tokenizer={base / 'tokenizer.json'}"
    assert convert(checkpoint, tmp_path / "c", "--model", chosen) == 0
    for name, file in (("a", base / "tokenizer.json"), ("b", own), ("c", base / "tokenizer.json")):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == file.read_bytes()
    ids = AutoTokenizer.from_pretrained(tmp_path / "b")(CORPUS[2])["input_ids"]
    assert ids == words(CORPUS).encode(CORPUS[2]).ids


def test_missing_model_folder_is_named(tmp_path, capsys):
    model = drawn(architecture="gpt2", arguments=MODELS["gpt2"])
    model.save_pretrained(tmp_path / "base")
    checkpoint = save(tmp_path / "run", model, path=str(tmp_path / "base"))
    (tmp_path / "base").rename(tmp_path / "moved")
    assert convert(checkpoint, tmp_path / "out") == 1
    assert "does not exist here; give its path with --model path=FOLDER" in capsys.readouterr().err
    assert convert(checkpoint, tmp_path / "out", "--model", f"path={tmp_path / 'moved'}") == 0
    assert torch.equal(logits(loaded(tmp_path / "out", "gpt2"), "gpt2"), logits(model, "gpt2"))


HOSTILE = [
    ({"arguments": {"attn_implementation": "someone/kernel"}}, "stands for code, files or parts"),
    (
        {"arguments": {"text_config": {"_attn_implementation": "a/b"}}},
        "stands for code, files or parts",
    ),
    (
        {"arguments": {"quantization_config": {"quant_method": "bitsandbytes"}}},
        "quantized weights, such as the base of QLoRA, are not loaded",
    ),
    ({"arguments": {"num_hidden_layers": 10**9}}, "is more than 10,000 layers"),
    ({"arguments": {"num_labels": 10**9}}, "num_labels=1000000000 is more than"),
    ({"arguments": {"no_such_key": 1}}, "LlamaConfig has no no_such_key"),
    ({"arguments": {"hidden_size": "wide"}}, "the checkpoint's model: "),
    (
        {"arguments": {"num_hidden_layers": 1}},
        "the weights do not fit LlamaForCausalLM: model.layers.1",
    ),
    ({"arguments": {**MODELS["llama"], "vocab_size": 32}}, "is [31, 16], the model's is [32, 16]"),
    ({"arguments": [1]}, "the checkpoint's model: TypeError"),
    ({"architecture": "someone/model"}, "has no architecture 'someone/model'"),
    ({"head": "os.system"}, "head 'os.system' is not one of auto, "),
    ({"head": ["causal_lm"]}, "head ['causal_lm'] is not one of auto, "),
    ({"path": "someone/model"}, "which does not exist here"),
    ({"architecture": "timm_wrapper", "arguments": {}}, "model_type=timm_wrapper stands for code"),
    ({"arguments": {"backbone": "resnet50"}}, "backbone=resnet50 stands for code"),
]


def test_invalid_model_settings_give_one_message(tmp_path, capsys):
    _, checkpoint = drawn_and_saved(tmp_path / "run", "llama")
    manifest = Path(checkpoint) / "manifest.json"
    original = manifest.read_bytes()
    for changes, message in HOSTILE:
        manifest.write_bytes(original)
        reseal(
            Path(checkpoint), lambda told, changes=changes: told["layout"]["model"].update(changes)
        )
        assert convert(checkpoint, tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert message in error, changes
        assert "Traceback" not in error
        assert not (tmp_path / "out").exists()


def test_code_in_a_model_folder_is_not_run(tmp_path, capsys):
    model = drawn(architecture="llama", arguments=MODELS["llama"])
    base = tmp_path / "base"
    model.save_pretrained(base)
    marker = tmp_path / "executed"
    (base / "own.py").write_text(f"open({str(marker)!r}, 'w')")
    config = configuration(base)
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (base / "config.json").write_text(json.dumps(config))
    checkpoint = save(tmp_path / "run", model, path=str(base))
    assert convert(checkpoint, tmp_path / "out") == 0
    assert "auto_map" not in configuration(tmp_path / "out")
    config["model_type"] = "own"
    (base / "config.json").write_text(json.dumps(config))
    assert convert(checkpoint, tmp_path / "other") == 1
    assert "parallel2d: the checkpoint's model: " in capsys.readouterr().err
    assert not marker.exists()


def test_invalid_tokenizer_is_not_copied(tmp_path, capsys):
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "x"}')
    _, checkpoint = drawn_and_saved(tmp_path / "run", "gpt2")
    reseal(Path(checkpoint), lambda told: told["layout"].update(tokenizer={"path": str(secret)}))
    assert convert(checkpoint, tmp_path / "out") == 1
    assert "is not a tokenizer.json" in capsys.readouterr().err


def test_export_peak_memory_is_one_file(tmp_path):
    small = {**MODELS["mixtral"], "num_hidden_layers": 2}
    large = {**small, "num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024}
    _, warm = drawn_and_saved(tmp_path / "small", "mixtral", small)
    model, checkpoint = drawn_and_saved(tmp_path / "large", "mixtral", large)
    mib = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    assert mib > 140
    chain = (f"convert {warm} warm --to hf", f"convert {checkpoint} out --to hf --shard-gib 0.02")
    assert growth(tmp_path, *chain) < mib / 3
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 5
