"""Every format round-trips bit by bit, Hugging Face computes the same logits, and no conversion holds the
model in memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint_hostile import Bomb
from training import LLAMA, build_llama, optimizer_of

from parallel2d.checkpoint import Checkpoint
from parallel2d.checkpoint.__main__ import main
from parallel2d.config import CheckpointConfig
from parallel2d.recovery import Checkpointer

ARGUMENTS = {**LLAMA, "norm_eps": 1e-5, "rope_theta": 500000.0}


def save(folder, model, optimizer=None, layout=None):
    checkpointer = Checkpointer(CheckpointConfig(), folder, None, model, optimizer, layout=layout)
    checkpointer.save_if_due(1, {"samples": 8}, last=True)
    checkpointer.finish()
    return str(folder / "checkpoints" / "step-00000001")


def initialized(**changes):
    torch.manual_seed(0)
    model = build_llama(**changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.fixture
def trained(tmp_path):
    """(folder of a checkpoint with optimizer state, its model, its optimizer)."""
    model = initialized()
    optimizer = optimizer_of(model)
    model(torch.arange(10)[None]).square().mean().backward()
    optimizer.step()
    return (
        save(tmp_path / "run", model, optimizer, {"config": {"model": ARGUMENTS}}),
        model,
        optimizer,
    )


def command(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def same_tensors(a, b, kinds=("model", "optimizer")):
    first, second = Checkpoint.open(str(a)), Checkpoint.open(str(b))
    names = [name for name in first.tensors if name.split("/")[0] in kinds]
    assert sorted(names) == sorted(second.tensors)
    for name in names:
        x, y = first.read(name), second.read(name)
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("through", ["x.safetensors", "x.pt", "x.hf"])
def test_weights_return_bit_by_bit_through(trained, tmp_path, through):
    folder, _, _ = trained
    command("convert", folder, tmp_path / through, *(["--to", "hf"] if through == "x.hf" else []))
    command("convert", tmp_path / through, tmp_path / "back", "--to", "parallel2d")
    command("verify", tmp_path / "back")
    same_tensors(folder, tmp_path / "back", kinds=("model",))


@pytest.mark.parametrize("through", ["x.safetensors", "x.pt", "x"])
def test_optimizer_state_and_position_return_and_training_goes_on(trained, tmp_path, through):
    folder, model, optimizer = trained
    to = ["--to", "parallel2d", "--shard-gib", "0.00001"] if through == "x" else []
    command("convert", folder, tmp_path / through, "--optimizer", *to)
    command("convert", tmp_path / through, tmp_path / "back", "--to", "parallel2d", "--optimizer")
    same_tensors(folder, tmp_path / "back")
    other = initialized()
    other_optimizer = optimizer_of(other)
    settings = CheckpointConfig(resume=str(tmp_path / "back"))
    state = Checkpointer(settings, tmp_path / "new", None, other, other_optimizer).restore()
    assert state == {"step": 1, "samples": 8}
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        each_optimizer.zero_grad()
        each(torch.arange(9)[None]).square().mean().backward()
        each_optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_torch_file_is_what_load_state_dict_takes(trained, tmp_path):
    folder, model, optimizer = trained
    command("convert", folder, tmp_path / "weights.pt")
    other = initialized()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    command("convert", folder, tmp_path / "all.pt", "--optimizer")
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    fresh = optimizer_of(other)
    fresh.load_state_dict(content["optimizer"])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key])
    assert zipfile.ZipFile(tmp_path / "all.pt").testzip() is None, (
        "the archive's own checksums are true"
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_by_torch_save_is_read(trained, tmp_path, legacy):
    folder, model, _ = trained
    torch.save(model.state_dict(), tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    command("convert", tmp_path / "x.pt", tmp_path / "back", "--to", "parallel2d")
    same_tensors(folder, tmp_path / "back", kinds=("model",))


def test_tensors_that_are_views_are_read_as_what_they_show(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"a": base[1:3], "b": base.T, "c": base[:, ::2]}, tmp_path / "x.pt")
    command("convert", tmp_path / "x.pt", tmp_path / "x.safetensors")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["a"], base[1:3])
    assert torch.equal(found["b"], base.T)
    assert torch.equal(found["c"], base[:, ::2])


@pytest.mark.extras
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    model = initialized(tie_embeddings=tied)
    layout = {"model": {**ARGUMENTS, "tie_embeddings": tied}}
    folder = save(tmp_path / "run", model, layout=layout)
    command("convert", folder, tmp_path / "hf", "--to", "hf", "--shard-gib", "0.00001")
    assert len([name for name in os.listdir(tmp_path / "hf") if name.endswith(".safetensors")]) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="sdpa"
    )
    tokens = torch.randint(0, LLAMA["vocab_size"], (2, 33))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.extras
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_made_by_transformers_trains_on_from_its_weights(tmp_path, capsys, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=67, max_position_embeddings=64, tie_word_embeddings=tied, rms_norm_eps=1e-6,
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "hf")
    command("convert", tmp_path / "hf", tmp_path / "ours", "--to", "parallel2d")
    overrides = dict(re.findall(r"model\.(\w+)=(\S+)", capsys.readouterr().out))
    arguments = {key: json.loads(value) for key, value in overrides.items()}
    model = initialized(**arguments)
    optimizer = optimizer_of(model)
    settings = CheckpointConfig(resume=str(tmp_path / "ours"), load="model_only", every=0)
    checkpointer = Checkpointer(settings, tmp_path / "run", None, model, optimizer)
    assert checkpointer.restore() is None
    tokens = torch.randint(0, 67, (2, 20))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)
    before = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    before.backward()
    optimizer.step()
    after = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert after < before


def test_dtype_is_converted_and_optimizer_state_is_not(trained, tmp_path):
    folder, model, _ = trained
    command("convert", folder, tmp_path / "half.pt", "--optimizer", "--dtype", "bf16")
    content = torch.load(tmp_path / "half.pt", weights_only=True)
    assert torch.equal(content["model"]["norm.weight"], model.norm.weight.to(torch.bfloat16))
    assert content["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32


def fails(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert len(text) < 600
    return text


def test_nothing_is_written_over(trained, tmp_path, capsys):
    (tmp_path / "x.pt").write_text("mine")
    assert "exists already" in fails(capsys, "convert", trained[0], tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"


def test_a_conversion_that_fails_leaves_nothing(trained, tmp_path, capsys, monkeypatch):
    from parallel2d.checkpoint import storage as store

    before = sorted(os.listdir(tmp_path))

    def full(self, place, name, blocks):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.LocalStore, "write", full)
    for target, to in (("x.safetensors", "safetensors"), ("hf", "hf"), ("ours", "parallel2d")):
        assert "No space left" in fails(
            capsys, "convert", trained[0], tmp_path / target, "--to", to
        )
    assert sorted(os.listdir(tmp_path)) == before


def test_what_the_source_does_not_tell_is_asked_for(trained, tmp_path, capsys):
    command("convert", trained[0], tmp_path / "x.safetensors")
    from safetensors.torch import load_file, save_file

    save_file(load_file(tmp_path / "x.safetensors"), tmp_path / "bare.safetensors")
    text = fails(capsys, "convert", tmp_path / "bare.safetensors", tmp_path / "hf", "--to", "hf")
    assert "--model n_heads=..." in text
    given = [
        f"--model={key}={ARGUMENTS[key]}"
        for key in ("n_heads", "n_kv_heads", "max_seq_len", "norm_eps", "rope_theta")
    ]
    command("convert", tmp_path / "bare.safetensors", tmp_path / "hf", "--to", "hf", *given)


@pytest.mark.parametrize("name", ["x.pt", "x.bin", "x.safetensors"])
@pytest.mark.parametrize("kind", ["pickle", "torch.save", "safetensors metadata"])
def test_files_that_run_code_are_refused_unread(tmp_path, capsys, name, kind):
    marker = tmp_path / "executed"
    zipped = io.BytesIO()
    torch.save({"model": Bomb(marker)}, zipped)
    content = {
        "pickle": pickle.dumps(Bomb(marker)),
        "torch.save": zipped.getvalue(),
        "safetensors metadata": b"\x10\0\0\0\0\0\0\0"
        + b'{"__metadata__":'
        + b"1}"
        + pickle.dumps(Bomb(marker)),
    }[kind]
    (tmp_path / name).write_bytes(content)
    fails(capsys, "convert", tmp_path / name, tmp_path / "out", "--to", "parallel2d")
    fails(capsys, "inspect", tmp_path / name)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2 cannot be converted"),
        ({"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil"}, "cannot be converted"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers=many"),
        ({"rope_theta": "fast"}, "rope_theta"),
        ({"attention_bias": True}, "attention_bias=True is not what parallel2d's Llama computes"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_is_refused(
    trained, tmp_path, capsys, change, says
):
    command("convert", trained[0], tmp_path / "hf", "--to", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}))
    assert says in fails(capsys, "convert", tmp_path / "hf", tmp_path / "out", "--to", "parallel2d")


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", 7, "missing.safetensors"])
def test_a_hugging_face_index_cannot_name_files_elsewhere(trained, tmp_path, capsys, file):
    command("convert", trained[0], tmp_path / "hf", "--to", "hf", "--shard-gib", "0.00002")
    (tmp_path / "secret.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    fails(capsys, "convert", tmp_path / "hf", tmp_path / "out", "--to", "parallel2d")


def test_inspect_shows_step_layout_names_shapes_and_sizes(trained, capsys):
    command("inspect", trained[0])
    text = capsys.readouterr().out
    assert "step 1, position 8" in text
    assert re.search(r"model/layers\.0\.attention\.wq\.weight +F32 +4\.0 KiB +1 +\[32, 32\]", text)
    assert "optimizer: AdamW" in text
    command("inspect", trained[0], "--all")
    assert "optimizer/exp_avg/norm.weight" in capsys.readouterr().out


def test_verify_names_the_damaged_file(trained, capsys):
    command("verify", trained[0])
    assert "sound" in capsys.readouterr().out
    path = os.path.join(trained[0], "rank-00000.safetensors")
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert "rank-00000.safetensors" in fails(capsys, "verify", trained[0])


PEAK = """
import resource, sys
from parallel2d.checkpoint.__main__ import main
import torch._dynamo  # what fake tensors load at first use is no tensor
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for arguments in sys.argv[1:]:
    assert main(arguments.split()) == 0
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_peak_memory_is_a_few_tensors_not_the_model(tmp_path):
    tensors, mib = 24, 8
    values = {
        f"w{i}": torch.nn.Parameter(torch.full((mib, 2**18), float(i))) for i in range(tensors)
    }
    source = save(tmp_path / "run", torch.nn.ParameterDict(values))
    chain = [
        f"convert {source} a.safetensors",
        "convert a.safetensors a.pt",
        "convert a.pt back --to parallel2d",
    ]
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *chain],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    grown = float(result.stdout.split()[-1])
    assert grown < tensors * mib / 3, result.stdout
    same_tensors(source, tmp_path / "back", kinds=("model",))


def replaced(path, name, data, method=zipfile.ZIP_DEFLATED):
    """The archive with ``data`` in place of one of its records."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for record, content in records.items():
            archive.writestr(record, data if record.endswith(name) else content)


@pytest.mark.parametrize("format", ["zip", "stream"])
def test_values_that_a_view_repeats_are_not_written_out(tmp_path, capsys, format):
    zipped = format == "zip"
    torch.save(
        {"w": torch.zeros(1).expand(2**20, 2**20)},
        tmp_path / "w.pt",
        _use_new_zipfile_serialization=zipped,
    )
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 1
    assert (
        "its tensors would take 4398046511104: they repeat their values" in capsys.readouterr().err
    )
    torch.save(
        {"w": torch.ones(1).expand(3, 4)}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped
    )
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 0


@pytest.mark.parametrize("record", ["data/0", "data.pkl"])
def test_a_compressed_archive_is_not_unpacked(tmp_path, capsys, record):
    torch.save({"w": torch.zeros(100)}, tmp_path / "w.pt")
    replaced(tmp_path / "w.pt", record, bytes(2**26))
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 1
    assert "w.pt is a compressed archive" in capsys.readouterr().err


def test_advice_to_load_a_file_without_care_is_not_passed_on(tmp_path, capsys):
    torch.save({"w": torch.zeros(100)}, tmp_path / "w.pt")
    # a state for a tuple, which torch refuses to set
    replaced(tmp_path / "w.pt", "data.pkl", b"\x80\x02)}b.", zipfile.ZIP_STORED)
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 1
    said = capsys.readouterr().err
    assert "Weights only load failed" in said
    assert "weights_only" not in said


def test_a_single_file_is_inspected(tmp_path, capsys):
    torch.save({"w": torch.zeros(100)}, tmp_path / "w.pt")
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 0
    assert main(["inspect", str(tmp_path / "w.safetensors")]) == 0
    assert "model/w" in capsys.readouterr().out


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        {"a": Calls(bytearray, 3_000_000_000)},
        {"a": b"bytes"},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.empty(3, device="meta")},
    ],
    ids=["memory", "codec", "sparse", "meta"],
)
def test_what_weights_do_not_need_is_not_read(tmp_path, capsys, content, zipped):
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    begin = time.monotonic()
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 1
    assert "is not a file of weights alone" in capsys.readouterr().err
    assert time.monotonic() - begin < 2


def test_a_key_that_takes_for_ever_to_hash_is_not_made(tmp_path, capsys):
    # a dict with a tuple of two tuples of two tuples ... as its key
    tuples = b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s."
    torch.save({"w": torch.zeros(100)}, tmp_path / "w.pt")
    replaced(tmp_path / "w.pt", "data.pkl", tuples, zipfile.ZIP_STORED)
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 1
    assert "its tuples are nested too deeply" in capsys.readouterr().err


def test_an_archive_behind_another_file_and_names_alike_are_not_mistaken(tmp_path, capsys):
    stream, archive = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(2)}, stream, _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(2)}, archive)
    (tmp_path / "both.pt").write_bytes(stream.getvalue() + archive.getvalue())
    assert main(["convert", str(tmp_path / "both.pt"), str(tmp_path / "both.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "both.safetensors")["a"], torch.zeros(2))
    with zipfile.ZipFile(tmp_path / "two.pt", "w") as two, zipfile.ZipFile(archive) as one:
        for name in one.namelist():
            two.writestr(name, one.read(name))
            if name.endswith("data.pkl"):
                two.writestr(name.upper(), one.read(name))
    assert main(["convert", str(tmp_path / "two.pt"), str(tmp_path / "two.safetensors")]) == 1
    assert "two entries of one name" in capsys.readouterr().err


@pytest.mark.parametrize("zipped", [True, False])
def test_views_are_converted_by_their_values(tmp_path, zipped):
    number = torch.tensor([1 + 2j, 3 + 4j])
    views = {
        "imaginary": number.conj().imag,
        "one": torch.arange(8.0)[::8],
        "every": torch.arange(8.0)[::2],
        "turned": torch.eye(3)[:2].T,
    }
    torch.save(views, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")]) == 0
    found = load_file(tmp_path / "w.safetensors")
    for name, view in views.items():
        assert torch.equal(found[name], view.resolve_neg()), name
