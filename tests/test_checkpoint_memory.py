"""In-memory checkpoints on the nodes: copies restored after each failure, and copies never used."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from unittest import mock

import memory_runs
import pytest
import torch
import torch.distributed as dist
from memory_runs import train_until
from training import largest_difference
from workers import WorkerError

from parallel2d import CheckpointConfig, Checkpointer
from parallel2d.base.config import SyncConfig
from parallel2d.base.files import private_folders as folders
from parallel2d.base.launcher_environment import MEMORY_DIR
from parallel2d.training.checkpoint import in_memory
from parallel2d.training.checkpoint.local_state import STATE
from parallel2d.training.checkpoint.manifest import content_digest

HYBRID, SHARDED = {"replicate": 2, "shard": 2}, {"replicate": 1, "shard": 2}
FOUR = {"replicate": 4, "shard": 1}


class Cluster:
    """A run directory, and nodes by letter: ``run(ranks, "AABB", ...)`` is a start with two ranks
    on A and two on B.
    """

    def __init__(self, folder: Path, ranks):
        self.folder, self.ranks = folder, ranks
        self.run_dir = folder / "run"

    def node(self, letter: str) -> Path:
        return self.folder / f"node-{letter}"

    def run(self, nodes: str, mesh=HYBRID, **options):
        homes = [str(self.node(letter)) for letter in nodes]
        return self.ranks.run(len(nodes), train_until, str(self.run_dir), homes, mesh, **options)

    def lose(self, letters: str) -> None:
        for letter in letters:
            shutil.rmtree(self.node(letter))

    def copies(self, letter: str) -> list[str]:
        """Names STEP.RANKS of the copies on a node."""
        found = self.node(letter).glob("run-*/*/*/*/step-*")
        return sorted(
            f"{int(path.name[5:])}.{path.parent.name.replace('0000', '')}" for path in found
        )

    def damage(self, letter: str, step: int) -> None:
        """Changes the last byte of every state of a step."""
        for file in self.node(letter).glob(f"run-*/*/*/*/step-{step:08d}/{STATE}"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)


@pytest.fixture
def cluster(tmp_path, ranks):
    return Cluster(tmp_path, ranks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, ranks):
    return Cluster(tmp_path_factory.mktemp("undisturbed"), ranks).run("AABB", until=6, every=0)


def is_logged(lives, text: str) -> bool:
    return any(text in line for life in lives for line in life["log"])


def start(lives) -> int:
    (step,) = {life["start"] for life in lives}
    return step


def continues(lives, whole, first: int, rel: float = 0, draws: bool = True) -> None:
    """The losses and random numbers of the steps after ``first`` equal a run without a restart
    bitwise.
    """
    assert start(lives) == first - 1
    for now, then in zip(lives, whole, strict=True):
        assert not draws or now["draws"] == {step: then["draws"][step] for step in now["draws"]}
        expected = {step: then["losses"][step] for step in now["losses"]}
        assert now["losses"] == pytest.approx(expected, rel=rel, abs=0)


def test_replaced_node_restores_bitwise_from_the_other_replica(cluster, undisturbed):
    cluster.run("AABB", until=5)
    assert cluster.copies("A") == ["2.place-0", "2.place-1", "4.place-0", "4.place-1"]
    assert cluster.copies("B") == ["2.place-2", "2.place-3", "4.place-2", "4.place-3"]
    cluster.lose("B")
    # The node that is left has other ranks now.
    lives = cluster.run("CCAA", until=6)
    continues(lives, undisturbed, 5, draws=False)
    assert not list((cluster.run_dir / "checkpoints").glob("step-*"))
    assert is_logged(lives, "loaded step-00000004 from memory")
    # A new node gets its copy after the first step; two copies are kept.
    assert cluster.copies("C") == ["5.place-0", "5.place-1", "6.place-0", "6.place-1"]


@pytest.mark.slow
def test_state_split_across_replicas_is_restored_from_a_backup_node(cluster, tmp_path, ranks):
    """With split updates in bf16 a rank needs a larger part of an average than of the weights that
    it keeps unrounded.
    """
    split = {"strategy": "hybrid_full", "precision": "fp64", "sync": SyncConfig(wire="bf16")}
    options = {"until": 5, "parallel": split, "decay": 0.9}
    whole = Cluster(tmp_path / "whole", ranks).run("AABB", FOUR, every=0, **options)
    cluster.run("AABB", FOUR, **{**options, "until": 3})
    assert cluster.copies("A") == ["2.rank-0", "2.rank-1", "2.rank-2", "2.rank-3"]
    cluster.lose("B")
    lives = cluster.run("AACC", FOUR, **options)
    continues(lives, whole, 3)
    assert largest_difference(lives[3]["averages"], whole[3]["averages"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync",
    [SyncConfig("diloco", every=3), SyncConfig(wire="int4", warmup=0)],
    ids=["diloco", "int4"],
)
def test_state_of_one_replica_is_restored_from_its_node_or_disk(cluster, tmp_path, ranks, sync):
    parallel = {"strategy": "hybrid", "precision": "fp64", "sync": sync}
    whole = Cluster(tmp_path / "whole", ranks).run("AABB", until=6, every=0, parallel=parallel)
    cluster.run("AABB", until=5, parallel=parallel, disk_every=3)
    again = cluster.run("AABB", until=6, parallel=parallel)
    # 4 bits are not resumed to the bit, from the disk neither.
    rel = 0 if sync.name == "diloco" else 1e-4
    continues(again, whole, 5, rel)
    assert not is_logged(again, "lost")
    cluster.lose("B")
    lives = cluster.run("AACC", until=6, parallel=parallel)
    continues(lives, whole, 4, rel)
    assert is_logged(
        lives, "step-00000006 in memory is incomplete: no copy is left of ranks [2, 3]"
    )


@pytest.mark.slow
def test_resume_on_another_mesh_or_layout_uses_disk_and_logs_it(cluster, undisturbed):
    cluster.run("AABB", until=5, disk_every=3)
    shutil.copytree(cluster.run_dir, cluster.folder / "copied")
    less = cluster.run("AA", SHARDED, until=3)
    assert start(less) == 3
    assert is_logged(less, "step-00000004 from memory was saved on another mesh")
    # The same mesh, but replicas split the state now.
    full = {"strategy": "hybrid_full", "precision": "fp64"}
    cluster.run("AABB", until=5)
    lives = cluster.run("AABB", until=6, parallel=full)
    assert start(lives) == 3
    assert is_logged(lives, "the layout differs")
    assert lives[0]["losses"][6] == pytest.approx(undisturbed[0]["losses"][6], rel=1e-10, abs=0)
    shutil.rmtree(cluster.run_dir / "checkpoints")
    with pytest.raises(WorkerError, match="checkpoint.resume=never starts again"):
        cluster.run("AABB", until=7)


def test_kill_during_a_memory_copy_keeps_the_previous_copy(cluster):
    with pytest.raises(WorkerError):
        cluster.run("AA", SHARDED, until=6, fault=memory_runs.die_before_the_third_rename)
    assert "4.place-1" in cluster.copies("A")
    assert "6.place-1" not in cluster.copies("A")
    assert start(cluster.run("AA", SHARDED, until=5)) == 4


@pytest.mark.slow
def test_damaged_copy_is_named_and_an_older_copy_or_disk_is_used(cluster):
    cluster.run("AABB", until=5, disk_every=1, keep_last=0)
    for step in (2, 3, 4, 5):
        shutil.rmtree(cluster.run_dir / "checkpoints" / f"step-{step:08d}")
    cluster.damage("A", 4)
    lives = cluster.run("AABB", until=5)
    assert start(lives) == 2
    assert is_logged(lives, "skipping step-00000004 in memory: step-00000004 from memory")
    cluster.lose("B")
    lives = cluster.run("AACC", until=1, fault=memory_runs.change_sent_values)
    assert start(lives) == 1, "nothing but the disk is left"
    assert is_logged(lives, "its SHA-256 is not the manifest's")


@pytest.mark.slow
def test_newer_of_memory_and_disk_is_loaded_and_memory_on_a_tie(cluster):
    cluster.run("AABB", until=5, every=2, disk_every=5)
    lives = cluster.run("AABB", until=8, every=2, disk_every=8)
    assert lives[0]["start"] == 5
    assert not is_logged(lives, "from memory")
    lives = cluster.run("AABB", until=9, every=2)
    assert lives[0]["start"] == 8
    assert is_logged(lives, "loaded step-00000008 from memory")
    assert is_logged(lives, "0 ranks received their parts"), "each node has its own"
    assert lives[0]["age"] == 1, "the newest checkpoint on disk is of step 8"


@pytest.mark.slow
def test_copies_of_another_run_are_not_used(cluster):
    cluster.run("AABB", until=4)
    cluster.run_dir = cluster.folder / "other"
    assert start(cluster.run("AABB", until=2)) == 0
    cluster.run_dir = cluster.folder / "run"
    assert start(cluster.run("AABB", until=4)) == 4, "and the other run left them alone"


@pytest.mark.slow
def test_copies_of_abandoned_steps_are_not_used(cluster):
    cluster.run("AABB", until=6, disk_every=3)
    # a node that is cut off with copies of steps 4 and 6
    shutil.copytree(cluster.node("B"), cluster.node("Z"))
    cluster.lose("AB")
    shutil.rmtree(cluster.run_dir / "checkpoints" / "step-00000006")
    lives = cluster.run("CCDD", until=4, disk_every=3)
    assert lives[0]["start"] == 3
    cluster.lose("CD")
    lives = cluster.run("ZZYY", until=3, disk_every=3)  # the node is back
    assert lives[0]["start"] == 3
    assert not is_logged(lives, "from memory")
    assert cluster.copies("Z") == [], "and they are gone"


@pytest.mark.slow
def test_manual_restart_follows_checkpoint_resume(cluster):
    cluster.run("AABB", until=5, disk_every=3)
    where = str(cluster.run_dir / "checkpoints" / "step-00000003")
    for resume, step in ((where, 3), ("never", 0)):
        assert start(cluster.run("AABB", until=4, restarted=False, resume=resume)) == step
    lives = cluster.run("AABB", until=4, resume=where)
    assert start(lives) == 4, "its own workers, restarted, go on from its own copy"
    cluster.run("AABB", until=1, every=0, restarted=False, resume="never")
    assert start(cluster.run("AABB", until=1)) == 0, "a start without copies has left them"


def test_full_memory_disables_copies_on_all_ranks_and_training_continues(cluster, undisturbed):
    lives = cluster.run("AABB", until=6, fault=memory_runs.full_on_the_second_copy)
    assert [life["on"] for life in lives] == [False] * 4
    assert lives[0]["losses"] == undisturbed[0]["losses"]
    (warning,) = [
        line for life in lives for line in life["log"] if "in-memory checkpoints off" in line
    ]
    assert "No space left on device" in warning
    assert cluster.copies("A") == cluster.copies("B") == []


@pytest.fixture
def small_tmpfs(cluster):
    """Node B's memory: a separate file system of 1 MiB."""
    cluster.node("B").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(cluster.node("B"))]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield cluster.node("B")
    subprocess.run(["umount", str(cluster.node("B"))], check=True)


def test_node_without_memory_for_two_copies_disables_copies(cluster, small_tmpfs):
    lives = cluster.run("AABB", until=4, llama={"dim": 128})
    assert [life["on"] for life in lives] == [False] * 4
    assert is_logged(lives, "MiB of shared memory are free, and two copies need")
    assert cluster.copies("A") == []
    assert not list(small_tmpfs.iterdir())


def test_completed_run_leaves_no_memory_copy(cluster):
    for end in ("finished", "preempted"):
        cluster.run("AABB", until=2, end=end, disk_every=100)
        assert [list(cluster.node(letter).iterdir()) for letter in "AB"] == [[], []]
        shutil.rmtree(cluster.run_dir)


def test_world_writable_folder_is_not_used(tmp_path, monkeypatch):
    tmp_path.chmod(0o1777)
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path))
    with pytest.raises(PermissionError, match="other users may write to it"):
        in_memory.open_place()
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path / "mine"))
    assert in_memory.open_place() == str(tmp_path / "mine")


def test_memory_copies_are_private_and_symlinks_are_not_followed(cluster, tmp_path):
    cluster.run("AA", SHARDED, until=2)
    root = cluster.node("A")
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    (tmp_path / "elsewhere").mkdir()
    cluster.node("L").symlink_to(tmp_path / "elsewhere")
    lives = cluster.run("LL", SHARDED, until=4)
    assert [life["on"] for life in lives] == [False, False]
    assert is_logged(lives, "a link is not followed")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_forged_manifest_is_skipped(cluster):
    cluster.run("AA", SHARDED, until=4, disk_every=3)
    for path in cluster.node("A").rglob("step-00000004/manifest.json"):
        content = json.loads(path.read_text())
        for tensor in content["tensors"].values():
            tensor["chunks"] = [
                ["../../../secret.safetensors", *chunk[1:]] for chunk in tensor["chunks"]
            ]
        content.pop("sha256")
        path.write_text(json.dumps({**content, "sha256": content_digest(content)}))
    lives = cluster.run("AA", SHARDED, until=4)
    assert lives[0]["start"] == 3
    assert is_logged(lives, "skipping step-00000004 in memory")


def test_auto_enables_copies_where_workers_are_restarted(cluster):
    assert not any(life["on"] for life in cluster.run("AABB", until=1, every="auto"))
    answers = cluster.ranks.run(4, _auto, str(cluster.run_dir), str(cluster.node("A")), HYBRID)
    assert [life["on"] for life in answers] == [True] * 4
    assert is_logged(answers, "in-memory checkpoints on: one every 10 steps")


def _auto(run_dir, node, mesh):
    # Rank 0's environment decides; the environments of the other ranks have no effect.
    given = {"TORCHELASTIC_MAX_RESTARTS": "3" if dist.get_rank() == 0 else "0"}
    with mock.patch.dict(os.environ, given):
        return train_until(run_dir, [node] * 4, mesh, until=1, every="auto", restarted=False)


def test_folders_of_ended_launchers_are_removed_and_missing_space_names_the_key(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(in_memory, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.delenv(MEMORY_DIR, raising=False)
    mine = in_memory.open_place()
    around = Path(mine).parent
    gone = subprocess.Popen(["true"])
    gone.wait()
    (around / f"launcher-{gone.pid}-1").mkdir()
    (around / f"launcher-{os.getpid()}-1").mkdir()  # this process, but with another start time
    alive = Path(folders.folder_of(os.getpid(), str(tmp_path)))
    alive.mkdir()
    assert in_memory.open_place() == mine
    assert {path.name for path in around.iterdir()} == {alive.name, Path(mine).name}
    monkeypatch.setattr(in_memory, "SHARED_MEMORY", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=f"set {MEMORY_DIR}"):
        in_memory.open_place()
    assert not (tmp_path / "nowhere").exists()


def test_damaged_restart_record_is_named_in_the_error(tmp_path):
    assert in_memory._read_record(str(tmp_path)) == ("", ())
    for text in ('{"start": "a", "loaded": 1}', '{"starts": [["a", 1]]}'):
        (tmp_path / in_memory.RECORD).write_text(text)
        with pytest.raises(ValueError, match="has no name of a start"):
            in_memory._read_record(str(tmp_path))


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_copies_last_until_the_update_of_a_known_optimizer(tmp_path, monkeypatch, has_optimizer):
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path / "memory"))
    config = CheckpointConfig(every=0, memory_every=1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters()) if has_optimizer else None
    copies = in_memory.in_memory_checkpoints(config, tmp_path, None)
    checkpointer = Checkpointer(config, tmp_path, None, model, optimizer, copies=copies)
    start = mock.Mock(wraps=copies._staging.start)
    monkeypatch.setattr(copies._staging, "start", start)
    checkpointer.save_if_due(1, {})
    checkpointer.finish()
    ((_, until_update), _) = start.call_args
    assert len(until_update) == (2 if has_optimizer else 0)
