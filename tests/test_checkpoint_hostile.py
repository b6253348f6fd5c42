"""Checkpoints made to harm: nothing in them runs, nothing outside of them is read, and the answer
is one clear message.

Checksums are recomputed to match after every alteration: they guard against accidents and are not
the defence.
"""

import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import struct
import time
import zipfile

import pytest
import torch
from test_checkpoint_policy import Small, same

from parallel2d.base.errors import ConfigError
from parallel2d.checkpoint import main
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint.manifest import check_tiling, content_digest

DATA = "rank-00000.safetensors"


class Bomb:
    """Unpickling it creates the file ``marker``."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    Small(folder).train(1).checkpointer.finish()
    return folder / "checkpoints" / "step-00000001"


@pytest.fixture
def victim(original, tmp_path):
    shutil.copytree(original, tmp_path / "step-00000001")
    return tmp_path / "step-00000001"


def reseal(folder, change=lambda manifest: None):
    """Alters the manifest and makes every checksum and size true again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name, item in manifest["files"].items():
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            item.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    change(manifest)
    manifest.pop("sha256")
    manifest["sha256"] = content_digest(manifest)
    path.write_text(json.dumps(manifest))


def rewrite_header(folder, change):
    """Alters the header of the data file; the values stay where they are."""
    data = (folder / DATA).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / DATA).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    reseal(folder)


def refused(folder, tmp_path, says="", **options):
    """Resuming from ``folder`` gives one `ConfigError` of a few lines and leaves the model as it was."""
    small = Small(tmp_path / "run", resume=str(folder))
    before = [value.clone() for value in small.values()]
    with pytest.raises(ConfigError) as error:
        small.checkpointer.restore(**options)
    text = str(error.value)
    assert says in text
    assert len(text) < 1000
    assert "\x1b" not in text
    assert error.value.__cause__ is None
    same(small, before)
    assert small.optimizer.param_groups[0]["lr"] == 0.1


def bombs(marker):
    zipped = io.BytesIO()
    torch.save({"model": Bomb(marker)}, zipped)
    return {"pickle": pickle.dumps(Bomb(marker)), "torch.save": zipped.getvalue()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("manifest.json", "pickle"),
        ("manifest.json", "torch.save"),
        (DATA, "pickle"),
        (DATA, "torch.save"),
        (".metadata", "pickle"),
        ("extra.pt", "torch.save"),
        ("extra.safetensors", "pickle"),
    ],
)
def test_a_pickle_in_any_file_is_never_executed(victim, tmp_path, name, kind):
    marker = tmp_path / "executed"
    (victim / name).write_bytes(bombs(marker)[kind])
    if name == DATA:
        reseal(victim)
    if name in ("manifest.json", DATA):
        refused(victim, tmp_path)
    else:  # not part of the checkpoint: it is not even opened
        assert Small(tmp_path / "run", resume=str(victim)).restore()["step"] == 1
    assert not marker.exists()


def test_only_pickled_dcp_folder_is_named_as_dcp(tmp_path):
    marker = tmp_path / "executed"
    os.makedirs(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    refused(tmp_path / "dcp", tmp_path, ".metadata is a pickle and is never read")
    assert not marker.exists()


def test_references_to_code_in_saved_settings_stay_text(victim, tmp_path):
    marker = tmp_path / "executed"

    def plant(manifest):
        manifest["layout"] = {"_target_": "os.system", "_args_": [f"touch {marker}"]}
        manifest["state"]["hook"] = {"_target_": "os.system", "command": f"touch {marker}"}
        manifest["optimizer"]["groups"][0]["settings"]["_target_"] = "os.system"

    reseal(victim, plant)
    state = Small(tmp_path / "run", resume=str(victim)).restore()
    assert state["hook"]["_target_"] == "os.system"
    assert not marker.exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([[]], "the settings of the optimizer's groups are not a mapping"),
        ({"lr": "\x1b[31m" + "9" * 10_000}, "its lr is"),
        ({"betas": 0.9}, "its betas is 0.9, not a list"),
    ],
)
def test_saved_settings_of_another_type_are_refused(victim, tmp_path, settings, says):
    reseal(victim, lambda manifest: manifest["optimizer"]["groups"][0].update(settings=settings))
    refused(victim, tmp_path, says, settings=True)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../secret.safetensors",
        "..",
        "",
        "C:\\x.safetensors",
        "s3://bucket/x.safetensors",
        "x\0.safetensors",
        "\x1b[2Jx.safetensors",
        "x.pt",
        "~root.safetensors",
    ],
)
def test_file_names_that_are_paths_are_refused(victim, tmp_path, name):
    shutil.copy(victim / DATA, tmp_path / "secret.safetensors")

    def rename(manifest):
        manifest["files"] = {name: manifest["files"].pop(DATA)}
        for tensor in manifest["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk[0] = name

    reseal(victim, rename)
    refused(victim, tmp_path, "cannot be the name of a file")


def test_symlinked_step_is_skipped(original, tmp_path):
    Small(tmp_path).train(1).checkpointer.finish()
    os.symlink(original, tmp_path / "checkpoints" / "step-00000009")
    assert Small(tmp_path).restore()["step"] == 1
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "checkpoints")
    says = f"checkpoint.folder={tmp_path}/elsewhere has checkpoints"
    with pytest.raises(ConfigError, match=says):
        Small(tmp_path)
    refused(tmp_path, tmp_path / "other", "checkpoint.folder=")
    assert main(["verify", str(tmp_path)]) == 1


def _file(header):
    return struct.pack("<Q", len(header)) + header


def a_zip(_data):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("data.pkl", b"x")
    return content.getvalue()


EMPTY = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def data_as(content):
    """Replace the data file with the result of ``content``."""

    def change(folder):
        (folder / DATA).write_bytes(content((folder / DATA).read_bytes()))
        reseal(folder)

    return change


def tensor_as(**changes):
    """Another header: a tensor of it is described in another way."""
    return lambda folder: rewrite_header(
        folder, lambda header: header["model/0.weight"].update(changes)
    )


def flip_a_bit(folder):
    data = bytearray((folder / DATA).read_bytes())
    data[-9] ^= 4
    (folder / DATA).write_bytes(data)


def alter_manifest(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step":1', '"step":2'))


def make_instead(make):
    def change(folder):
        os.unlink(folder / DATA)
        make(folder / DATA)

    return change


def link_out(name):
    def change(folder):
        shutil.move(folder / name, folder.parent / "elsewhere")
        os.symlink(folder.parent / "elsewhere", folder / name)

    return change


def overlap(header):
    header["model/2.weight"]["data_offsets"] = list(header["model/0.weight"]["data_offsets"])
    header["model/2.weight"]["shape"] = header["model/0.weight"]["shape"]


def rename(header):
    header["extra"] = header.pop("model/0.weight")


ALTERED = {
    "a flipped bit": (flip_a_bit, "SHA-256"),
    "no data": (lambda folder: os.unlink(folder / DATA), f"{DATA} is missing"),
    "a manifest of a TiB": (lambda folder: os.truncate(folder / "manifest.json", 2**40), "more than the"),
    "a manifest of another step": (alter_manifest, "its own checksum does not match"),
    "a pipe": (make_instead(os.mkfifo), "not a regular file"),
    "a folder for a file": (make_instead(os.mkdir), "not a regular file"),
    "a link for its data": (link_out(DATA), "symbolic link"),
    "a link for its manifest": (link_out("manifest.json"), "symbolic link"),
    "tensors that overlap": (lambda folder: rewrite_header(folder, overlap), "overlap or leave a hole"),
    "tensors of other names": (lambda folder: rewrite_header(folder, rename), "the manifest says"),
    "negative offsets": (tensor_as(data_offsets=[-8, 40]), DATA),
    "offsets past the end": (tensor_as(data_offsets=[10**9, 10**9 + 48]), DATA),
    "an absurd shape": (tensor_as(shape=[2**40, 2**40]), DATA),
    "a strange dtype": (tensor_as(dtype="PICKLE"), DATA),
    "another dtype of the same size": (tensor_as(dtype="I32"), DATA),
    "another shape of the same size": (tensor_as(shape=[4, 3]), DATA),
    "data cut short": (data_as(lambda data: data[: len(data) // 2]), DATA),
    "a flipped bit of the header": (data_as(lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:]),
        DATA),
    "a header of 99 MB that is not there": (data_as(lambda data: struct.pack("<Q", 99_000_000) + data[8:]),
        DATA),
    "a zip for data": (data_as(a_zip), DATA),
    "a deeply nested header": (data_as(lambda _: _file(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)), DATA),
    "a number of a million digits": (data_as(lambda _: _file(b'{"a":' + b"9" * 1_000_000 + b"}")), DATA),
    "more names than a model has": (data_as(lambda _: _file(json.dumps(dict.fromkeys(map(str,
        range(250_001)))).encode())), "more than 250000"),
    "twice the same name": (data_as(lambda _: _file(b"{" + EMPTY + b"," + EMPTY + b"}")), DATA),
}  # fmt: skip


@pytest.mark.parametrize("name", ALTERED)
def test_hostile_checkpoint_folder_is_refused(victim, tmp_path, capsys, name):
    alter, says = ALTERED[name]
    alter(victim)
    refused(victim, tmp_path, says)
    assert main(["verify", str(victim)]) == 1
    assert says in capsys.readouterr().err


def _set(*path_and_value):
    *path, key, value = path_and_value

    def change(manifest):
        for part in path:
            manifest = manifest[part]
        manifest[key] = value

    return change


def _tensor(**changes):
    return lambda manifest: manifest["tensors"]["model/0.weight"].update(changes)


def _chunk(index, value):
    return _set("tensors", "model/0.weight", "chunks", 0, index, value)


def _renamed(name):
    def change(manifest):
        manifest["tensors"][name] = manifest["tensors"].pop("model/0.weight")

    return change


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


WHOLE = [DATA, [0, 0], [3, 4]]
MANIFESTS = {
    "no tensors": lambda manifest: manifest.pop("tensors"),
    "files as a list": _set("files", [DATA]),
    "another format": _set("format", 99),
    "a step that is text": _set("step", "latest"),
    "a huge step": _set("step", 10**400),
    "state nested a hundred deep": _set("state", "a", _nested(100)),
    "a mesh of text": _set("mesh", {"shard": "two"}),
    "a hundred thousand dims": _tensor(shape=[1] * 100_000),
    "an unknown dtype": _tensor(dtype="os.system"),
    "no chunks": _tensor(chunks=[]),
    "a chunk outside": _chunk(1, [1, 0]),
    "an empty chunk": _tensor(chunks=[WHOLE, [DATA, [0, 0], [0, 4]]]),
    "a chunk in no file": _chunk(0, "other.safetensors"),
    "the same chunk twice": _tensor(chunks=[WHOLE, WHOLE]),
    "chunks that overlap": _tensor(chunks=[[DATA, [0, 0], [2, 4]], [DATA, [1, 0], [1, 4]]]),
    "a file with an absurd size": _set("files", DATA, "bytes", 2**62),
    "a checksum that is none": _set("files", DATA, "sha256", "x" * 64),
    "a tie to nothing": _set("tied", {"a": "b"}),
    "groups of nothing": _set("optimizer", "groups", [{"parameters": [[]]}]),
    "a name with an escape sequence": _renamed("\x1b[31mred"),
    "a random generator of another dtype": _set("tensors", "rng/00000/torch", "dtype", "I8"),
    "a random generator of a million words": _set(
        "tensors",
        "rng/00000/python",
        {"dtype": "U8", "shape": [10**6], "chunks": [[DATA, [0], [10**6]]]},
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_hostile_manifest_is_refused(victim, tmp_path, name):
    reseal(victim, MANIFESTS[name])
    refused(victim, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"null",
        b"[" * 200_000,
        b'{"format":1,"format":1}',
        b"\xff",
        b'{"format":' + b"1" * 100_000 + b"}",
    ],
)
def test_malformed_manifest_is_refused(victim, tmp_path, text):
    (victim / "manifest.json").write_bytes(text)
    refused(victim, tmp_path, "manifest.json")


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_invalid_random_generator_states_are_refused(victim, tmp_path, name):
    data = bytearray((victim / DATA).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + length])[f"rng/00000/{name}"]["data_offsets"]
    data[8 + length + begin : 8 + length + end] = b"\x7f" * (end - begin)
    (victim / DATA).write_bytes(data)
    reseal(victim)
    with pytest.raises(ConfigError, match="not the state of a random generator"):
        Small(tmp_path / "run", resume=str(victim)).restore()


def test_non_tensor_state_cannot_replace_tensors(victim, tmp_path):
    scalars = {"0.weight": {"exp_avg": 7, "step": "x", "__class__": "os"}}
    reseal(victim, _set("optimizer", "scalars", scalars))
    small = Small(tmp_path / "run", resume=str(victim))
    small.restore()
    assert isinstance(small.optimizer.state[small.model[0].weight]["exp_avg"], torch.Tensor)
    small.train(1)


TRAINED = {
    "step": 1,
    "samples": 32,
    "tokens": 100,
    "skipped": 0,
    "skipped_in_a_row": 0,
    "scaler": {"scale": 1.0, "good_steps": 0},
    "data_fingerprint": "00",
}
STATES = {
    "nothing": {},
    "text for a number": TRAINED | {"tokens": "many"},
    "too many samples": TRAINED | {"samples": 2**53},
    "another step": TRAINED | {"step": 2},
    "more steps than samples": TRAINED | {"samples": 0},
    "more skipped than done": TRAINED | {"skipped": 2},
    "an infinite scale": TRAINED | {"scaler": {"scale": "inf", "good_steps": 0}},
    "good steps to come": TRAINED | {"scaler": {"scale": 1.0, "good_steps": 5}},
    "a fingerprint that is none": TRAINED | {"data_fingerprint": ["a"]},
}


@pytest.mark.parametrize("name", STATES)
def test_run_does_not_resume_from_hostile_state(victim, tmp_path, name):
    reseal(victim, lambda manifest: manifest["layout"].update(global_batch_size=32))
    reseal(victim, _set("state", STATES[name]))
    refused(victim, tmp_path, "no run can continue from its state")
    assert main(["verify", str(victim)]) == 1
    reseal(victim, _set("state", TRAINED))
    assert main(["verify", str(victim)]) == 0
    assert Small(tmp_path / "run", resume=str(victim)).restore()["tokens"] == 100


def test_step_of_another_size_and_mesh_of_other_ranks_are_refused(victim, tmp_path):
    reseal(victim, lambda manifest: manifest.update(step=2**62))
    refused(victim, tmp_path, "too large")
    reseal(victim, lambda manifest: manifest.update(step=2**53))
    refused(victim, tmp_path, "too large")
    reseal(victim, lambda manifest: manifest.update(step=1, mesh={"shard": 3}))
    refused(victim, tmp_path, "is not one of 1 ranks")
    begin = time.process_time()
    for axes, says in ((50_000, "too many axes"), (8, "is not one of 1 ranks")):
        mesh = {str(axis): 2**63 - 1 for axis in range(axes)}
        reseal(victim, lambda manifest, mesh=mesh: manifest.update(mesh=mesh))
        refused(victim, tmp_path, says)
    (victim / "manifest.json").write_bytes(b'{"a":[' + b"{}," * 1_000_000 + b"{}]}")
    refused(victim, tmp_path, "more lists than a file of its size has")
    assert time.process_time() - begin < 5


def grid(shape, parts):
    sizes = tuple(size // n for size, n in zip(shape, parts, strict=True))
    numbers = itertools.product(*map(range, parts))
    return [
        Region(tuple(i * size for i, size in zip(place, sizes, strict=True)), sizes)
        for place in numbers
    ]


@pytest.mark.parametrize(
    ("shape", "regions"),
    [
        ((), [Region((), ())]),
        ((0, 4), []),
        ((9,), grid((9,), (3,))),
        ((6, 8, 10), grid((6, 8, 10), (2, 4, 5))),
        ((10, 100_000), grid((10, 100_000), (1, 100_000))),
    ],
    ids=["scalar", "empty", "line", "grid", "many"],
)
def test_valid_chunks_are_accepted_in_bounded_time(shape, regions):
    random.Random(1).shuffle(regions)
    begin = time.process_time()
    check_tiling(shape, regions)
    assert time.process_time() - begin < 5


CORNERS = [Region((0, 0), (1, 1)), Region((1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("shape", "regions"),
    [
        ((), [Region((), ()), Region((), ())]),
        ((4,), [Region((0,), (2,)), Region((1,), (2,))]),
        ((2, 2), CORNERS * 2),
        # Covered, but not cut along whole planes
        ((2, 2), [Region((0, 0), (2, 1)), Region((0, 1), (1, 1)), Region((1, 1), (1, 1))]),
        ((10, 1000), [*grid((10, 1000), (1, 1000))[:-1], Region((0, 0), (10, 1))]),
        ((4,) * 24, [Region((0,) * d + (2,) + (0,) * (23 - d), (2,) * 24) for d in range(24)]),
    ],
)
def test_invalid_chunks_are_refused_in_bounded_time(shape, regions):
    begin = time.process_time()
    with pytest.raises(ValueError):
        check_tiling(shape, regions)
    assert time.process_time() - begin < 2
