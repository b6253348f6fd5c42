"""Every format round-trips bit by bit, Hugging Face computes the same logits, no conversion holds
the model in memory, and files that are made to harm are one message within bounds.
"""

import copy
import inspect
import json
import math
import os
import re
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from jobs import peak_memory
from safetensors.torch import load_file, save_file
from test_checkpoint_hostile import bombs
from training import LLAMA, build_llama, optimizer_of

from parallel2d.base.config import CheckpointConfig
from parallel2d.base.files import limited_child
from parallel2d.base.files.tensor_file import DTYPES
from parallel2d.checkpoint import main
from parallel2d.training.checkpoint import Checkpoint, Checkpointer
from parallel2d.training.checkpoint.convert import convert, formats

ARGUMENTS = {**LLAMA, "norm_eps": 1e-5, "rope_theta": 500000.0}
TRANSFORMERS = pytest.mark.extras("transformers")


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of a checkpoint with optimizer state, its model, its optimizer)."""
    model = initialized()
    optimizer = optimizer_of(model)
    model(torch.arange(10)[None]).square().mean().backward()
    optimizer.step()
    run = tmp_path_factory.mktemp("run")
    return save(run, model, optimizer, {"config": {"model": ARGUMENTS}}), model, optimizer


def command(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def fails(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 1
    text = capsys.readouterr().err
    assert text.startswith("parallel2d: ")
    assert "Traceback" not in text
    assert len(text) < 600
    return text


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_parameters(a, b):
    for first, second in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(first, second)


def same_logits(theirs, ours):
    tokens = torch.randint(0, LLAMA["vocab_size"], (2, 33))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)


def same_tensors(a, b, kinds=("model", "optimizer")):
    first, second = Checkpoint.open(str(a)), Checkpoint.open(str(b))
    names = [name for name in first.tensors if name.split("/")[0] in kinds]
    assert sorted(names) == sorted(second.tensors)
    for name in names:
        x, y = first.read(name), second.read(name)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(bits(x), bits(y)), name


@pytest.mark.parametrize("through", ["x.safetensors", "x.pt", "x"])
def test_converted_checkpoint_returns_bitwise_and_training_continues(trained, tmp_path, through):
    folder, model, optimizer = trained
    to = ["--to", "parallel2d", "--shard-gib", "0.00001"] if through == "x" else []
    command("convert", folder, tmp_path / through, "--optimizer", *to)
    command("convert", tmp_path / through, tmp_path / "back", "--to", "parallel2d", "--optimizer")
    command("verify", tmp_path / "back")
    same_tensors(folder, tmp_path / "back")
    other = initialized()
    other_optimizer = optimizer_of(other)
    settings = CheckpointConfig(resume=str(tmp_path / "back"))
    state = Checkpointer(settings, tmp_path / "new", None, other, other_optimizer).restore()
    assert state == {"step": 1, "samples": 8}
    model, again = copy.deepcopy((model, optimizer))
    for each, each_optimizer in ((model, again), (other, other_optimizer)):
        each_optimizer.zero_grad()
        each(torch.arange(9)[None]).square().mean().backward()
        each_optimizer.step()
    same_parameters(model, other)


def test_every_dtype_and_shape_returns_through_every_flat_format(tmp_path):
    values = {name: torch.arange(12).to(dtype).view(3, 4) for name, dtype in DTYPES.items()}
    values |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "nan": torch.ones(1) * math.nan,
    }
    torch.save({**values, "again": values["F32"]}, tmp_path / "a.pt")
    for source, target in (("a.pt", "b.safetensors"), ("b.safetensors", "c.pt"), ("c.pt", "d")):
        to = ["--to", "parallel2d"] if target == "d" else []
        command("convert", tmp_path / source, tmp_path / target, *to)
    command("convert", tmp_path / "d", tmp_path / "e.pt")
    assert zipfile.ZipFile(tmp_path / "e.pt").testzip() is None, "its own checksums are true"
    found = torch.load(tmp_path / "e.pt", weights_only=True, mmap=True)
    assert found["again"].data_ptr() == found["F32"].data_ptr()
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(bits(found[name]), bits(value)), name
    assert load_file(tmp_path / "b.safetensors").keys() == values.keys()


def test_converted_torch_file_loads_with_load_state_dict(trained, tmp_path):
    folder, model, optimizer = trained
    command("convert", folder, tmp_path / "weights.pt")
    other = initialized()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    same_parameters(model, other)
    command("convert", folder, tmp_path / "all.pt", "--optimizer", "--dtype", "bf16")
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(content["model"]["norm.weight"], model.norm.weight.to(torch.bfloat16))
    fresh = optimizer_of(other)
    fresh.load_state_dict(content["optimizer"])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert fresh.state[b][key].dtype == torch.float32
            assert torch.equal(value, fresh.state[b][key])


@pytest.mark.parametrize("ending", [".safetensors", ".pt", ""])
def test_dtype_casts_parameters_and_keeps_buffers(tmp_path, ending):
    """Also through a checkpoint without optimizer state, and to a file without an ending."""
    model = torch.nn.Linear(3, 4)
    model.register_buffer("frequencies", torch.rand(5))
    source = formats.read_ours(save(tmp_path / "run", model))
    source.layout = {"global_batch_size": 8}  # as the train command saves
    convert(source, str(tmp_path / "ours"), "parallel2d")
    target = tmp_path / f"weights{ending}"
    kind = "safetensors" if ending == ".safetensors" else "torch"
    command("convert", tmp_path / "ours", target, "--to", kind, "--dtype", "bf16")
    found = load_file(target) if kind == "safetensors" else torch.load(target)
    assert torch.equal(found["frequencies"], model.frequencies)
    assert torch.equal(found["weight"], model.weight.bfloat16())


@pytest.mark.parametrize("zipped", [True, False])
def test_tensor_views_are_read_with_their_own_values(tmp_path, capsys, zipped):
    base, number = torch.arange(24.0).reshape(4, 6), torch.tensor([1 + 2j, 3 + 4j])
    views = {
        "rows": base[1:3],
        "turned": base.T,
        "every": base[:, ::2],
        "one": torch.arange(8.0)[::8],
        "imaginary": number.conj().imag,
        "repeated": torch.ones(1).expand(3, 4),
    }
    options = {"_use_new_zipfile_serialization": zipped}
    torch.save(views, tmp_path / "w.pt", **options)
    command("convert", tmp_path / "w.pt", tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    for name, view in views.items():
        assert torch.equal(found[name], view.resolve_neg()), name
    torch.save({"w": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "w.pt", **options)
    text = fails(capsys, "convert", tmp_path / "w.pt", tmp_path / "x.safetensors")
    assert "its tensors would take 4398046511104: they repeat their values" in text


@TRANSFORMERS
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_equal_logits_and_weights_convert_back(tmp_path, tied):
    import transformers

    model = initialized(tie_embeddings=tied)
    folder = save(tmp_path / "run", model, layout={"model": {**ARGUMENTS, "tie_embeddings": tied}})
    command("convert", folder, tmp_path / "hf", "--to", "hf", "--shard-gib", "0.00001")
    assert len([name for name in os.listdir(tmp_path / "hf") if name.endswith(".safetensors")]) > 2
    same_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), model)
    command("convert", tmp_path / "hf", tmp_path / "back", "--to", "parallel2d")
    same_tensors(folder, tmp_path / "back", kinds=("model",))


@TRANSFORMERS
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_llama_continues_training_from_its_weights(tmp_path, capsys, tied):
    import transformers

    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=67,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            rms_norm_eps=1e-6,
        )
    )
    theirs.save_pretrained(tmp_path / "hf")
    command("convert", tmp_path / "hf", tmp_path / "ours", "--to", "parallel2d")
    overrides = dict(re.findall(r"model\.(\w+)=(\S+)", capsys.readouterr().out))
    model = initialized(**{key: json.loads(value) for key, value in overrides.items()})
    settings = CheckpointConfig(resume=str(tmp_path / "ours"), load="model_only", every=0)
    checkpointer = Checkpointer(settings, tmp_path / "run", None, model, optimizer_of(model))
    assert checkpointer.restore() is None
    same_logits(theirs, model)


@TRANSFORMERS
def test_missing_source_settings_are_requested(trained, tmp_path, capsys):
    command("convert", trained[0], tmp_path / "x.safetensors")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tmp_path / "x.safetensors"), bare)
    text = fails(capsys, "convert", bare, tmp_path / "hf", "--to", "hf")
    assert "--model n_heads=..." in text
    assert "--model dim=..." not in text, "that follows from the weights"
    asked = ("n_heads", "n_kv_heads", "max_seq_len", "norm_eps", "rope_theta")
    words = [f"--model={key}={ARGUMENTS[key]}" for key in asked]
    command("convert", bare, tmp_path / "hf", "--to", "hf", *words)
    other = ("convert", bare, tmp_path / "other", "--to", "hf", *words)
    assert "is not a number" in fails(capsys, *other, "--model=n_heads=many")
    assert "is not one of dim, n_layers" in fails(capsys, *other, "--model=heads=4")


REFUSED_CONFIGURATIONS = [
    ({"model_type": "gpt2"}, "a gpt2 cannot be converted, only a llama"),
    ({"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil"}, "config.json: "),
    ({"hidden_size": -1}, "The hidden size (-1)"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "is more than 10,000 layers"),
    (
        {"rope_parameters": {"rope_theta": "fast", "rope_type": "default"}},
        "rope_theta=fast must be a number above 0",
    ),
    ({"attention_bias": True}, "attention_bias=True is not what parallel2d's Llama computes"),
    (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "rope_parameters",
    ),
]


@TRANSFORMERS
def test_invalid_hugging_face_folder_is_refused(trained, tmp_path, capsys):
    command("convert", trained[0], tmp_path / "hf", "--to", "hf", "--shard-gib", "0.00002")
    out = (tmp_path / "out", "--to", "parallel2d")
    file = tmp_path / "hf" / "config.json"
    good = file.read_text()
    for change, says in REFUSED_CONFIGURATIONS:
        file.write_text(json.dumps({**json.loads(good), **change}))
        assert says in fails(capsys, "convert", tmp_path / "hf", *out), change
    file.write_text(good)
    (tmp_path / "secret.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in ("../secret.safetensors", "/etc/passwd", 7, "missing.safetensors"):
        index["weight_map"]["lm_head.weight"] = name
        path.write_text(json.dumps(index))
        fails(capsys, "convert", tmp_path / "hf", *out)


def test_convert_overwrites_no_file_and_leaves_no_partial_output(
    trained, tmp_path, capsys, monkeypatch
):
    (tmp_path / "x.pt").write_text("mine")
    assert "exists already" in fails(capsys, "convert", trained[0], tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for target, to in (("x.safetensors", "safetensors"), ("y.pt", "torch"), ("ours", "parallel2d")):
        text = fails(capsys, "convert", trained[0], tmp_path / target, "--to", to)
        assert "No space left" in text
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "safetensors metadata"])
def test_files_that_run_code_are_refused(tmp_path, capsys, kind):
    marker = tmp_path / "executed"
    contents, header = bombs(marker), b'\x10\0\0\0\0\0\0\0{"__metadata__":1}'
    content = (contents | {"safetensors metadata": header + contents["pickle"]})[kind]
    for name in ("x.pt", "x.bin", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        fails(capsys, "convert", tmp_path / name, tmp_path / "out", "--to", "parallel2d")
        fails(capsys, "inspect", tmp_path / name)
    assert not marker.exists()


def archive_with(path, name, data, method=zipfile.ZIP_STORED):
    """A file of `torch.save` with ``data`` in place of one of its records."""
    torch.save({"w": torch.zeros(100)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for record, content in records.items():
            archive.writestr(record, data if record.endswith(name) else content)


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        Calls(bytearray, 3_000_000_000),
        b"bytes",
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
    ids=["memory", "codec", "sparse", "meta"],
)
def test_convert_reads_only_the_entries_of_weights(tmp_path, capsys, value, zipped):
    torch.save({"a": value}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    text = fails(capsys, "convert", tmp_path / "w.pt", tmp_path / "w.safetensors")
    assert "does not contain only weights" in text


HARMFUL = {
    # A dict with a tuple of two tuples of two tuples ... as its key.
    "a key that takes years to hash": (
        b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s",
        "it takes above 1 seconds",
    ),
    "an array of 4 TiB": (
        b"}X\1\0\0\0wctorch.storage\nUntypedStorage\n\x8a\6\0\0\0\0\0\4\x85Rs",
        "4398046511104",
    ),
    "some millions of lists": (b"]" * 2_000_000, "w.pt is not"),
    "a name of a million letters": (b"c" + b"a" * 1_000_000 + b"\nb\n", "w.pt is not"),
    # A state for a tuple, which torch refuses to set.
    "a state for a tuple": (b")}b", "Can only build Tensor"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if " million" in name else name
        for name in HARMFUL
    ],
)
def test_damaged_torch_file_gives_one_message_in_bounded_memory(
    tmp_path, capsys, monkeypatch, name
):
    monkeypatch.setattr(limited_child, "MOST_SECONDS", 1)
    monkeypatch.setattr(limited_child, "MOST_BYTES", 2**26)
    data, says = HARMFUL[name]
    archive_with(tmp_path / "w.pt", "data.pkl", b"\x80\x02" + data + b".")
    text = fails(capsys, "convert", tmp_path / "w.pt", tmp_path / "w.safetensors")
    assert says in text
    assert "weights_only" not in text, "advice to load it without care is not passed on"
    assert not (tmp_path / "w.safetensors").exists()


@pytest.mark.parametrize("record", ["data/0", "data.pkl"])
def test_a_compressed_archive_is_not_unpacked(tmp_path, capsys, record):
    archive_with(tmp_path / "w.pt", record, bytes(2**20), zipfile.ZIP_DEFLATED)
    text = fails(capsys, "convert", tmp_path / "w.pt", tmp_path / "w.safetensors")
    assert "it is a compressed archive" in text


def test_malformed_optimizer_settings_give_one_message(tmp_path, capsys):
    facts = json.dumps({"optimizer": {"groups": [{"names": ["a"]}]}})
    tensors = {"a": torch.ones(2), "optimizer/exp_avg/a": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"parallel2d": facts})
    words = [str(tmp_path / "a.safetensors"), str(tmp_path / "a.pt"), "--optimizer"]
    assert main(["convert", *words]) == 1
    assert "groups do not list parameter names" in capsys.readouterr().err


def test_sparse_file_is_not_converted(tmp_path, capsys):
    size = 2**33
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "w.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    text = fails(capsys, "convert", tmp_path / "w.safetensors", tmp_path / "w.pt")
    assert "of which 4096 are on the disk" in text


def test_inspect_lists_the_content_and_verify_confirms_it(trained, tmp_path, capsys):
    command("inspect", trained[0])
    text = capsys.readouterr().out
    assert "step 1, position 8" in text
    assert re.search(r"model/layers\.0\.attention\.wq\.weight +F32 +4\.0 KiB +1 +\[32, 32\]", text)
    assert "optimizer: AdamW" in text
    command("inspect", trained[0], "--all")
    assert "optimizer/exp_avg/norm.weight" in capsys.readouterr().out
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    command("inspect", tmp_path / "w.safetensors")
    assert "model/w" in capsys.readouterr().out
    command("verify", trained[0])
    assert "sound" in capsys.readouterr().out


MEASURED = f"""
import sys
from parallel2d.checkpoint import main
import torch._dynamo  # what fake tensors load at first use is no tensor
codes = [main(sys.argv[1].split())]
{inspect.getsource(peak_memory)}
before = peak_memory()
codes += [main(arguments.split()) for arguments in sys.argv[2:]]
assert not any(codes), codes
print((peak_memory() - before) / 2**20)
"""


def growth(folder, *commands):
    """Return the growth of the process in MiB after the first command has loaded its imports."""
    words = [sys.executable, "-c", MEASURED, *commands]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return float(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_convert_peak_memory_is_a_few_tensors(tmp_path):
    tensors, mib = 24, 8
    values = [torch.nn.Parameter(torch.full((mib, 2**18), float(i))) for i in range(tensors)]
    source = save(tmp_path / "run", torch.nn.ParameterList(values))
    chain = [f"convert {step}" for step in (f"{source} a.safetensors", "a.safetensors a.pt")]
    assert growth(tmp_path, f"inspect {source}", *chain) < tensors * mib / 3
    command("convert", tmp_path / "a.pt", tmp_path / "back", "--to", "parallel2d")
    same_tensors(source, tmp_path / "back", kinds=("model",))
