"""A checkpoint of a model of the ``transformers`` library becomes a folder that the library loads as it is, from any layout."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import torch
from test_checkpoint_hostile import reseal
from test_models_library import LIBRARY, MODELS, batch

from parallel2d.base.config import CheckpointConfig, HuggingFaceModel
from parallel2d.checkpoint import main
from parallel2d.models import huggingface
from parallel2d.training.checkpoint import Checkpointer

pytestmark = LIBRARY
AUTO = {
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def save(run, model, **settings):
    """The checkpoint of ``model``, as a run of these settings writes it."""
    layout = {"model": dataclasses.asdict(HuggingFaceModel(**settings))}
    checkpointer = Checkpointer(CheckpointConfig(), run, None, model, None, layout=layout)
    checkpointer.save_if_due(1, {"samples": 8}, last=True)
    checkpointer.finish()
    return str(run / "checkpoints" / "step-00000001")


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
    dtype = next(model.parameters()).dtype
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        return model.eval()(**inputs).logits


def saved_keys(model, folder):
    from safetensors import safe_open

    keys = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            keys |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    return keys


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in MODELS), ("llama", {"tie_word_embeddings": True})],
)
def test_the_folder_holds_what_the_library_would_save(tmp_path, kind, changes):
    arguments = {**MODELS[kind], **changes}
    model = drawn(architecture=kind, arguments=arguments)
    checkpoint = save(tmp_path / "run", model, architecture=kind, arguments=arguments)
    assert convert(checkpoint, tmp_path / "out") == 0
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (saved_keys(model, tmp_path / name) for name in ("out", "theirs"))
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    config, expected = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "theirs")
    )
    expected.pop("use_cache", None)  # which training turns off
    config.pop("use_cache", None)
    assert config == expected
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert torch.equal(logits(loaded(tmp_path / "out", kind), kind), logits(model, kind))


def words(texts):
    """A tokenizer.json of the library, of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "EOS"]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    return tokenizer


CORPUS = [f"one plus {number} is more than {number}" for number in ("two", "three", "four")]


def trained(ranks, folder, settings, world, layout):
    """The run directory of a small job of ``settings``, two steps long."""
    (folder / "corpus.txt").write_text("\n".join(CORPUS * 400))
    tokenizer = folder / "words.json"
    words(CORPUS).save(str(tokenizer))
    text = [f"data.tokenizer={tokenizer}", "data.end_token=EOS", "data.validation_fraction=0"]
    given = ["model=hf", "precision=fp32", *settings, *text, *layout]
    ranks.run(world, jobs.run, str(folder), str(folder / "run"), given, 2)
    return folder / "run"


@pytest.mark.parametrize(("kind", "world", "layout"), [
    ("llama", 4, ["strategy=zero3", "mesh.tensor=2"]),
    ("mixtral", 4, ["strategy=hybrid_full"]),
])  # fmt: skip
def test_a_trained_run_of_any_layout_is_loaded_with_its_tokenizer(
    ranks, tmp_path, kind, world, layout
):
    from transformers import AutoTokenizer

    arguments = {**MODELS[kind], "tie_word_embeddings": kind == "llama"}
    base = drawn(architecture=kind, arguments=arguments)
    base.save_pretrained(tmp_path / "base")
    settings = [f"model.path={tmp_path / 'base'}"]
    run = trained(ranks, tmp_path, settings, world, layout)
    assert convert(run, tmp_path / "out") == 0
    # What was trained, read without any of the conversion.
    assert main(["convert", str(run), str(tmp_path / "plain.pt")]) == 0
    base.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    found = loaded(tmp_path / "out", kind)
    assert torch.equal(logits(found, kind), logits(base, kind))
    assert not torch.equal(
        logits(base, kind), logits(drawn(architecture=kind, arguments=arguments), kind)
    )
    assert found.config.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(CORPUS[0])["input_ids"] == words(CORPUS).encode(CORPUS[0]).ids
    assert tokenizer.eos_token == "EOS"


def test_files_beside_the_weights_of_the_folder_come_along(tmp_path):
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
    assert found.config.vocab_size == 40
    assert found.config.rms_norm_eps == 1e-3
    assert found.config.use_cache
    assert found.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits(found, "llama"), logits(model.bfloat16(), "llama"))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(CORPUS[1])["input_ids"]
    assert not list((tmp_path / "out").glob("*.py"))


def test_the_tokenizer_that_the_run_read_goes_along(tmp_path):
    from transformers import AutoTokenizer

    base, own = tmp_path / "base", tmp_path / "own.json"
    model = drawn(architecture="gpt2", arguments=MODELS["gpt2"])
    model.save_pretrained(base)
    words(CORPUS[:1]).save(str(base / "tokenizer.json"))
    words(CORPUS).save(str(own))
    checkpoint = save(tmp_path / "run", model, path=str(base))
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert convert(checkpoint, tmp_path / "a") == 0
    reseal(folder, lambda manifest: manifest["layout"].update(tokenizer={"path": str(own)}))
    assert convert(checkpoint, tmp_path / "b") == 0
    chosen = f"tokenizer={base / 'tokenizer.json'}"
    assert convert(checkpoint, tmp_path / "c", "--model", chosen) == 0
    for name, file in (("a", base / "tokenizer.json"), ("b", own), ("c", base / "tokenizer.json")):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == file.read_bytes()
    ids = AutoTokenizer.from_pretrained(tmp_path / "b")(CORPUS[2])["input_ids"]
    assert ids == words(CORPUS).encode(CORPUS[2]).ids


def test_a_folder_that_was_moved_is_named(tmp_path, capsys):
    model = drawn(architecture="gpt2", arguments=MODELS["gpt2"])
    model.save_pretrained(tmp_path / "base")
    checkpoint = save(tmp_path / "run", model, path=str(tmp_path / "base"))
    (tmp_path / "base").rename(tmp_path / "moved")
    assert convert(checkpoint, tmp_path / "out") == 1
    assert "is not here: say where it is with --model path=FOLDER" in capsys.readouterr().err
    assert convert(checkpoint, tmp_path / "out", "--model", f"path={tmp_path / 'moved'}") == 0
    assert torch.equal(logits(loaded(tmp_path / "out", "gpt2"), "gpt2"), logits(model, "gpt2"))


def changed(**changes):
    return lambda manifest: manifest["layout"]["model"].update(changes)


HOSTILE = [
    ({"arguments": {"attn_implementation": "someone/kernel"}}, "stands for code, files or parts"),
    ({"arguments": {"text_config": {"_attn_implementation": "a/b"}}}, "stands for code, files or parts"),
    ({"arguments": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "stands for code, files or parts"),
    ({"arguments": {"num_hidden_layers": 10**9}}, "is more than 10,000 layers"),
    ({"arguments": {"num_labels": 10**9}}, "num_labels=1000000000 is more than"),
    ({"arguments": {"no_such_key": 1}}, "LlamaConfig has no no_such_key"),
    ({"arguments": {"hidden_size": "wide"}}, "the checkpoint's model: "),
    ({"arguments": {"num_hidden_layers": 1}}, "the weights do not fit LlamaForCausalLM: model.layers.1"),
    ({"arguments": {**MODELS["llama"], "vocab_size": 32}}, "is [31, 16], the model's is [32, 16]"),
    ({"arguments": [1]}, "the checkpoint's model: TypeError"),
    ({"architecture": "someone/model"}, "has no architecture 'someone/model'"),
    ({"head": "os.system"}, "head 'os.system' is not one of auto, "),
    ({"head": ["causal_lm"]}, "head ['causal_lm'] is not one of auto, "),
    ({"path": "someone/model"}, "which is not here"),
    ({"architecture": "timm_wrapper", "arguments": {}}, "model_type=timm_wrapper stands for code"),
    ({"arguments": {"backbone": "resnet50"}}, "backbone=resnet50 stands for code"),
]  # fmt: skip


def test_settings_that_describe_no_model_are_one_message(tmp_path, capsys):
    arguments = MODELS["llama"]
    model = drawn(architecture="llama", arguments=arguments)
    checkpoint = save(tmp_path / "run", model, architecture="llama", arguments=arguments)
    manifest = Path(checkpoint) / "manifest.json"
    original = manifest.read_bytes()
    for changes, message in HOSTILE:
        manifest.write_bytes(original)
        reseal(Path(checkpoint), changed(**changes))
        assert convert(checkpoint, tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert message in error, changes
        assert "Traceback" not in error
        assert not (tmp_path / "out").exists()


def test_code_of_a_folder_is_not_run(tmp_path, capsys):
    model = drawn(architecture="llama", arguments=MODELS["llama"])
    base = tmp_path / "base"
    model.save_pretrained(base)
    marker = tmp_path / "executed"
    (base / "own.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (base / "config.json").write_text(json.dumps(config))
    checkpoint = save(tmp_path / "run", model, path=str(base))
    assert convert(checkpoint, tmp_path / "out") == 0
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    config["model_type"] = "own"
    (base / "config.json").write_text(json.dumps(config))
    assert convert(checkpoint, tmp_path / "other") == 1
    assert "error: the checkpoint's model: " in capsys.readouterr().err
    assert not marker.exists()


def test_a_tokenizer_that_is_none_is_not_copied(tmp_path, capsys):
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "x"}')
    model = drawn(architecture="gpt2", arguments=MODELS["gpt2"])
    checkpoint = save(tmp_path / "run", model, architecture="gpt2", arguments=MODELS["gpt2"])

    def plant(manifest):
        manifest["layout"]["tokenizer"] = {"path": str(secret)}

    reseal(tmp_path / "run" / "checkpoints" / "step-00000001", plant)
    assert convert(checkpoint, tmp_path / "out") == 1
    assert "is no tokenizer.json" in capsys.readouterr().err


def test_peak_memory_is_that_of_one_file(tmp_path):
    small = {**MODELS["mixtral"], "num_hidden_layers": 2}
    large = {**small, "num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024}
    folders = []
    for name, arguments in (("small", small), ("large", large)):
        model = drawn(architecture="mixtral", arguments=arguments)
        folders.append(save(tmp_path / name, model, architecture="mixtral", arguments=arguments))
    mib = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    assert mib > 140
    words = [sys.executable, "-c", PEAK, *folders]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    grown = float(result.stdout.split()[-1])
    assert grown < mib / 3, grown
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 5


PEAK = """
import sys
from parallel2d.checkpoint import main
import transformers.models.mixtral.modeling_mixtral

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

words = ["--to", "hf", "--shard-gib", "0.02"]
assert main(["convert", sys.argv[1], "warm", *words]) == 0
before = peak()
assert main(["convert", sys.argv[2], "out", *words]) == 0
print(peak() - before)
"""
