"""Checkpoints on storage that cannot rename, reached through fsspec: the manifest, written last,
is the publication.
"""

import os

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from test_checkpoint_policy import Small

from parallel2d.base.errors import ConfigError
from parallel2d.checkpoint import main
from parallel2d.training.checkpoint import Checkpoint


class Bucket(LocalFileSystem):
    """An object store on a folder: no renames, no appends."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def mv(self, *args, **kwargs):
        raise NotImplementedError("an object store cannot rename")

    mv_file = move = rename = mv


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture
def bucket(tmp_path):
    return f"bucket://{tmp_path}/store"


def names(bucket):
    path = bucket.removeprefix("bucket://")
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def test_remote_folder_saves_removes_old_steps_and_resumes(bucket, tmp_path):
    first = Small(tmp_path, folder=bucket, keep_last=2).train(4)
    first.checkpointer.finish()
    assert names(bucket) == ["step-00000003", "step-00000004"]
    second = Small(tmp_path, folder=bucket, seed=1)
    assert second.restore() == {"step": 4, "samples": 32}
    assert all((a == b).all() for a, b in zip(first.values(), second.values(), strict=True))


def test_folder_without_manifest_is_skipped_and_overwritten(bucket, tmp_path):
    Small(tmp_path, folder=bucket).train(2).checkpointer.finish()
    path = os.path.join(bucket.removeprefix("bucket://"), "step-00000002")
    os.unlink(os.path.join(path, "manifest.json"))
    open(os.path.join(path, "rank-00007.safetensors"), "w").close()
    small = Small(tmp_path, folder=bucket)
    assert small.restore()["step"] == 1
    small.train(1).checkpointer.finish()
    assert "rank-00007.safetensors" not in os.listdir(path)
    assert Small(tmp_path, folder=bucket).restore()["step"] == 2


def test_damaged_remote_checkpoints_are_skipped_and_moved_aside(bucket, tmp_path):
    Small(tmp_path, folder=bucket).train(2).checkpointer.finish()
    path = os.path.join(bucket.removeprefix("bucket://"), "step-00000002", "rank-00000.safetensors")
    with open(path, "r+b") as file:
        file.truncate(100)
    assert Small(tmp_path, folder=bucket).restore()["step"] == 1
    assert names(bucket) == ["aside-step-00000002-1", "step-00000001"]


def test_failed_upload_leaves_no_files(bucket, tmp_path, monkeypatch):
    small = Small(tmp_path, folder=bucket, asynchronous=False).train(1)

    def lost(self, path, value, **kwargs):
        raise ConnectionError("the store is away")

    monkeypatch.setattr(Bucket, "pipe_file", lost)
    small.train(1)
    assert small.checkpointer.failures == 1
    assert names(bucket) == ["step-00000001"]


def test_a_remote_path_resumes_verifies_and_converts(bucket, tmp_path, capsys):
    first = Small(tmp_path / "a", folder=bucket).train(2)
    first.checkpointer.finish()
    small = Small(tmp_path / "b", resume=bucket, seed=3)
    assert small.restore()["step"] == 2
    assert main(["verify", bucket]) == 0
    assert main(["convert", f"{bucket}/step-00000002", str(tmp_path / "x.pt")]) == 0
    assert main(["inspect", f"{bucket}/step-00000009"]) == 1
    assert "manifest.json is missing" in capsys.readouterr().err


def test_file_names_cannot_leave_a_remote_folder(bucket, tmp_path):
    Small(tmp_path, folder=bucket).train(1).checkpointer.finish()
    checkpoint = Checkpoint.open(f"{bucket}/step-00000001")
    for name in ("../step-00000001/manifest.json", "/etc/passwd", ".."):
        with pytest.raises(ConfigError, match="is a path"):
            checkpoint.folder.source(name)
