"""Copies of the state in the nodes' memory: what is found again after which loss, and what is never used."""

import json
import math
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path
from unittest import mock

import memory_runs
import pytest
import torch.distributed as dist
from checkpoint_runs import build, train_step
from memory_runs import life
from training import largest_difference
from workers import WorkerError

from parallel2d.base.config import CheckpointConfig, SyncConfig
from parallel2d.base.files import private_folders as folders
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.checkpoint.manifest import content_digest
from parallel2d.training.recovery import memory_copies, place
from parallel2d.training.recovery.buffer import RECORD, Buffer, find_copies
from parallel2d.training.recovery.search import Lineage

HYBRID, SHARDED = {"replicate": 2, "shard": 2}, {"replicate": 1, "shard": 2}
FOUR = {"replicate": 4, "shard": 1}


class Cluster:
    """A run directory, and nodes by letter: ``run(ranks, "AABB", ...)`` is a life with two ranks on A and two on B."""

    def __init__(self, folder: Path, ranks):
        self.folder, self.ranks = folder, ranks
        self.run_dir = folder / "run"

    def node(self, letter: str) -> Path:
        return self.folder / f"node-{letter}"

    def run(self, nodes: str, mesh=HYBRID, **options):
        homes = [str(self.node(letter)) for letter in nodes]
        return self.ranks.run(len(nodes), life, str(self.run_dir), homes, mesh, **options)

    def lose(self, letters: str) -> None:
        for letter in letters:
            shutil.rmtree(self.node(letter))

    def held(self, letter: str) -> list:
        runs = self.node(letter).glob("run-*")
        return [copy for run in runs for copy in find_copies(str(run))[0]]

    def copies(self, letter: str) -> list[tuple[int, int]]:
        """(step, rank) of what a node holds."""
        return sorted((copy.step, copy.rank) for copy in self.held(letter))

    def damage(self, letter: str, step: int) -> None:
        """Changes one byte of every file of a copy."""
        for copy in self.held(letter):
            for name in copy.record["files"] if copy.step == step else ():
                file = Path(copy.folder, name)
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)


@pytest.fixture
def cluster(tmp_path, ranks):
    return Cluster(tmp_path, ranks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, ranks):
    return Cluster(tmp_path_factory.mktemp("undisturbed"), ranks).run("AABB", until=6, every=0)


def said(lives, text: str) -> bool:
    return any(text in line for life in lives for line in life["log"])


def start(lives) -> int:
    (step,) = {life["start"] for life in lives}
    return step


def test_a_lost_node_comes_back_from_the_other_replica_bit_by_bit(cluster, undisturbed):
    cluster.run("AABB", until=5)
    assert cluster.copies("A") == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert cluster.copies("B") == [(2, 2), (2, 3), (4, 2), (4, 3)]
    cluster.lose("B")
    lives = cluster.run("AACC", until=6)
    assert start(lives) == 4
    for now, then in zip(lives, undisturbed, strict=True):
        for key in ("losses", "draws"):
            assert now[key] == {step: then[key][step] for step in (5, 6)}
    assert not list((cluster.run_dir / "checkpoints").glob("step-*"))
    assert said(lives, "sent to nodes without them")
    assert said(lives, "loaded step-00000004 from memory")
    # A new node gets a copy of its own after the first step; two are kept.
    assert cluster.copies("A") == [(5, 0), (5, 1), (6, 0), (6, 1)]
    assert cluster.copies("C") == [(5, 2), (5, 3), (6, 2), (6, 3)]


@pytest.mark.slow
def test_averages_of_weights_come_back_from_the_other_replica(cluster, tmp_path, ranks):
    """With split updates in bf16 a rank needs more of an average than of the weights that it keeps unrounded."""
    split = {"strategy": "hybrid_full", "precision": "fp64", "sync": SyncConfig(wire="bf16")}
    options = {"until": 4, "parallel": split, "decay": 0.9}
    whole = Cluster(tmp_path / "whole", ranks).run("ABCD", FOUR, every=0, **options)[0]
    cluster.run("ABCD", FOUR, **{**options, "until": 3})
    cluster.lose("D")
    lives = cluster.run("ABCE", FOUR, **options)
    assert start(lives) == 2
    for each in lives:
        assert largest_difference(each["averages"], whole["averages"]) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "lost"), [
    (SyncConfig("diloco", every=3), "the replicas [1] of the checkpoint are not continued"),
    (SyncConfig(wire="int4", warmup=0), "what the replicas [1] had not sent yet is lost with them"),
], ids=["diloco", "int4"])  # fmt: skip
def test_what_one_replica_alone_has_is_lost_with_its_node_and_that_is_said(cluster, sync, lost):
    parallel = {"strategy": "hybrid", "precision": "fp64", "sync": sync}
    cluster.run("AABB", until=5, parallel=parallel)
    again = cluster.run("AABB", until=6, parallel=parallel)
    assert start(again) == 4
    assert not said(again, lost)
    cluster.lose("B")
    lives = cluster.run("AACC", until=7, parallel=parallel)
    assert start(lives) == 6
    assert said(lives, lost)


@pytest.mark.slow
def test_a_shard_that_no_node_holds_falls_back_to_the_disk_and_says_which(cluster):
    cluster.run("ABCD", until=5, disk_every=3)
    cluster.lose("AC")
    lives = cluster.run("EBFD", until=6, disk_every=3)
    assert start(lives) == 3
    assert said(lives, "step-00000004 in memory is incomplete")
    assert said(lives, "no copy is left of ranks [0, 2]")


@pytest.mark.slow
def test_the_number_of_ranks_may_change_both_ways(cluster, undisturbed):
    cluster.run("AABB", until=3)
    cluster.lose("B")
    less = cluster.run("AA", SHARDED, until=4)
    assert start(less) == 2
    assert said(less, "was written by 4 ranks, here are 2")
    more = cluster.run("AACC", until=6)
    assert start(more) == 4
    expected = {step: undisturbed[0]["losses"][step] for step in range(3, 7)}
    found = {**less[0]["losses"], **more[0]["losses"]}
    assert found == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.parametrize("fault", [
    pytest.param("die_in_the_third_copy", marks=pytest.mark.slow), "die_before_the_third_record",
])  # fmt: skip
def test_a_kill_while_a_copy_is_made_leaves_the_one_before(cluster, fault):
    with pytest.raises(WorkerError):
        cluster.run("AA", SHARDED, until=6, fault=getattr(memory_runs, fault))
    assert [step for step, rank in cluster.copies("A") if rank == 1] == [4]
    assert start(cluster.run("AA", SHARDED, until=5)) == 4


@pytest.mark.slow
def test_damage_is_named_and_the_other_replica_or_an_older_copy_or_the_disk_is_used(cluster):
    cluster.run("AABB", until=4, disk_every=1, keep_last=0)
    for step in (2, 3, 4):
        shutil.rmtree(cluster.run_dir / "checkpoints" / f"step-{step:08d}")
    cluster.damage("A", 4)
    # Goes on from step 4, and copies the steps 5 and 6.
    lives = cluster.run("AABB", until=6)
    assert start(lives) == 4
    assert said(lives, "node 0: rank-00000.safetensors: its checksum is not that of its record")
    for letter in "AB":
        cluster.damage(letter, 6)
    lives = cluster.run("AABB", until=5)
    assert start(lives) == 5
    assert said(lives, "passing over the copy of step-00000006 in memory")
    cluster.lose("B")
    lives = cluster.run("AACC", until=1, fault=memory_runs.change_what_is_sent)
    assert start(lives) == 1, "nothing but the disk is left"
    assert said(lives, "was damaged on its way to node 1")


@pytest.mark.slow
def test_the_newer_of_memory_and_disk_is_loaded_and_memory_when_they_are_equal(cluster):
    cluster.run("AABB", until=5, every=2, disk_every=5)
    lives = cluster.run("AABB", until=8, every=2, disk_every=8)
    assert lives[0]["start"] == 5
    assert not said(lives, "from memory")
    lives = cluster.run("AABB", until=9, every=2)
    assert lives[0]["start"] == 8
    assert said(lives, "loaded step-00000008 from memory")
    assert said(lives, " 0.0 MiB sent to nodes without them"), "each node has its own"
    assert lives[0]["age"] == 1, "the newest checkpoint on disk is of step 8"


@pytest.mark.slow
def test_copies_of_another_run_are_not_used(cluster):
    cluster.run("AABB", until=4)
    cluster.run_dir = cluster.folder / "other"
    assert start(cluster.run("AABB", until=2)) == 0
    cluster.run_dir = cluster.folder / "run"
    assert start(cluster.run("AABB", until=4)) == 4, "and the other run left them alone"


@pytest.mark.slow
def test_steps_that_the_run_has_left_for_an_older_checkpoint_are_not_used(cluster):
    cluster.run("AABB", until=6, disk_every=3)
    # a node that is cut off with copies of steps 4 and 6
    shutil.copytree(cluster.node("B"), cluster.node("Z"))
    cluster.lose("AB")
    shutil.rmtree(cluster.run_dir / "checkpoints" / "step-00000006")
    lives = cluster.run("CCDD", until=4, disk_every=3)
    assert lives[0]["start"] == 3
    cluster.lose("CD")
    lives = cluster.run("ZZYY", until=5, disk_every=3)  # the node is back
    assert lives[0]["start"] == 3
    assert said(lives, "copies in memory of step 4, 6 are not of this run as it stands")
    assert cluster.copies("Z") == [(4, 0), (4, 1)], "and they are gone"


@pytest.mark.slow
def test_a_new_start_by_hand_takes_what_it_is_told_to(cluster):
    cluster.run("AABB", until=5, disk_every=3)
    where = str(cluster.run_dir / "checkpoints" / "step-00000003")
    for resume, step in ((where, 3), ("never", 0)):
        assert start(cluster.run("AABB", until=4, restarted=False, resume=resume)) == step
    lives = cluster.run("AABB", until=4, resume=where)
    assert start(lives) == 4, "its own workers, restarted, go on from its own copy"


def test_full_memory_turns_the_net_off_on_all_ranks_and_training_goes_on(cluster, undisturbed):
    lives = cluster.run("AABB", until=6, fault=memory_runs.full_on_the_second_copy)
    assert [life["on"] for life in lives] == [False] * 4
    assert lives[0]["losses"] == undisturbed[0]["losses"]
    (warning,) = [line for life in lives for line in life["log"] if "memory copies off" in line]
    assert "No space left on device" in warning
    assert cluster.copies("A") == cluster.copies("B") == []


@pytest.fixture
def small_tmpfs(cluster):
    """Node B's memory: a file system of its own with 1 MiB."""
    cluster.node("B").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(cluster.node("B"))]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield cluster.node("B")
    subprocess.run(["umount", str(cluster.node("B"))], check=True)


def test_one_node_without_room_for_two_copies_turns_the_net_off(cluster, small_tmpfs):
    lives = cluster.run("AABB", until=4, llama={"dim": 128})
    assert [life["on"] for life in lives] == [False] * 4
    assert said(lives, "MiB of shared memory to give and two copies need")
    assert cluster.copies("A") == []
    assert not list(small_tmpfs.iterdir())


def test_a_run_that_ends_leaves_nothing(cluster):
    for end in ("finished", "preempted"):
        cluster.run("AABB", until=2, end=end, disk_every=100)
        assert [list(cluster.node(letter).iterdir()) for letter in "AB"] == [[], []]
        shutil.rmtree(cluster.run_dir)


@pytest.mark.slow
def test_a_node_holds_its_part_of_the_state_twice_and_no_more(cluster):
    llama = {"dim": 256, "hidden_dim": 512, "n_layers": 2}
    lives = cluster.run("AABB", until=4, llama=llama)
    assert lives[0]["newest"] == 4
    (copy,) = [copy for copy in cluster.held("A") if (copy.step, copy.rank) == (4, 0)]
    shapes = [shape for _, dtype, shape in copy.record["tensors"] if dtype == "F64"]
    state = sum(8 * math.prod(shape) for shape in shapes)
    assert state > 2**23
    for letter in "AB":
        assert place.used(str(cluster.node(letter))) == pytest.approx(2 * state, rel=0.01)


def test_a_folder_for_everybody_is_left_as_it_is(tmp_path, monkeypatch):
    tmp_path.chmod(0o1777)
    monkeypatch.setenv(place.MEMORY_DIR, str(tmp_path))
    with pytest.raises(PermissionError, match="others may write to it"):
        place.open_place()
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    monkeypatch.setenv(place.MEMORY_DIR, str(tmp_path / "mine"))
    assert place.open_place().root == str(tmp_path / "mine")


def test_all_is_private_and_a_link_is_not_followed(cluster, tmp_path):
    cluster.run("AA", SHARDED, until=2)
    root = cluster.node("A")
    files = [path for path in root.rglob("*") if not path.is_dir()]
    assert {stat.S_IMODE(path.lstat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    (tmp_path / "elsewhere").mkdir()
    cluster.node("L").symlink_to(tmp_path / "elsewhere")
    lives = cluster.run("LL", SHARDED, until=4)
    assert [life["on"] for life in lives] == [False, False]
    assert said(lives, "a link is not followed")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_record_that_was_made_up_is_passed_over(cluster):
    cluster.run("AA", SHARDED, until=4, disk_every=3)
    for record in cluster.node("A").rglob(RECORD):
        content = json.loads(record.read_text())
        for part in content["parts"]:
            part[7] = "../../../secret.safetensors"
        content.pop("sha256")
        record.write_text(json.dumps({**content, "sha256": content_digest(content)}))
    lives = cluster.run("AA", SHARDED, until=4)
    assert lives[0]["start"] == 3
    assert said(lives, "passing over the copy of step-00000004 in memory")


def test_auto_is_on_where_workers_are_restarted(cluster):
    assert said(cluster.run("AABB", until=1, every="auto"), "TORCHELASTIC_MAX_RESTARTS is 0")
    answers = cluster.ranks.run(4, _auto, str(cluster.run_dir), str(cluster.node("A")), HYBRID)
    assert [life["on"] for life in answers] == [True] * 4
    assert said(answers, "memory copies on: one every 10 steps")


def _auto(run_dir, node, mesh):
    # Rank 0's environment decides: that of the others may say anything.
    given = {"TORCHELASTIC_MAX_RESTARTS": "3" if dist.get_rank() == 0 else "0"}
    with mock.patch.dict(os.environ, given):
        return life(run_dir, [node] * 4, mesh, until=1, every="auto", restarted=False)


def test_a_copy_that_is_not_finished_is_not_waited_for(cluster):
    answers = cluster.ranks.run(2, _busy, str(cluster.run_dir), str(cluster.node("A")))
    assert answers == [(1, 1, 3)] * 2


def _busy(run_dir, node):
    """(skipped, newest before, newest after): the first copy ends when the second one has been asked for."""
    asked, seal = threading.Event(), Buffer.seal

    def slow(self, *args):
        asked.wait()
        seal(self, *args)

    environment = mock.patch.dict(os.environ, {place.MEMORY_DIR: node})
    with environment, mock.patch.object(Buffer, "seal", slow):
        mesh, model, optimizer = build(SHARDED, memory_runs.FP64)
        settings = CheckpointConfig(every=0, memory_every=1)
        net = memory_copies(settings, run_dir, mesh)
        saver = Checkpointer(settings, run_dir, mesh, model, optimizer, copies=net)
        saver.restore()
        for step in (1, 2):
            train_step(model, optimizer, mesh, step)
            saver.save_if_due(step, {"samples": step})
        dist.barrier()
        asked.set()
        net.wait()
        before = net.newest
        saver.save_if_due(3, {"samples": 3})
        net.wait()
        return net.skipped, before, net.newest


def test_folders_of_gone_launchers_are_removed_and_none_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.delenv(place.MEMORY_DIR, raising=False)
    mine = place.open_place()
    around = Path(mine.root).parent
    gone = subprocess.Popen(["true"])
    gone.wait()
    (around / f"launcher-{gone.pid}-1").mkdir()
    (around / f"launcher-{os.getpid()}-1").mkdir()  # this process, but with another start time
    alive = Path(folders.folder_of(os.getpid(), str(tmp_path)))
    alive.mkdir()
    assert place.open_place() == mine
    assert {path.name for path in around.iterdir()} == {alive.name, Path(mine.root).name}
    alive.rmdir()
    place.remove_place(mine)
    assert not around.exists()
    monkeypatch.setattr(place, "SHARED_MEMORY", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=f"set {place.MEMORY_DIR}"):
        place.open_place()
    assert not (tmp_path / "nowhere").exists()


def test_a_lineage_is_kept_and_a_damaged_file_of_it_is_an_error_that_says_so(tmp_path):
    lineage = Lineage().followed_by("a", 0).followed_by("b", 30).followed_by("c", 20)
    assert lineage.holds("a", 20)
    assert not lineage.holds("a", 25)
    assert not lineage.holds("b", 31)
    assert lineage.holds("c", 1000)
    assert not lineage.holds("d", 1)
    Lineage().followed_by("a", 3).write(str(tmp_path))
    assert Lineage.read(str(tmp_path)).starts == (("a", 3),)
    for text, said in (
        ('{"starts": [["a", -1]]}', "not a name and a step"),
        ('{"starts": "ab"}', "missing or not a list"),
    ):
        (tmp_path / "memory.json").write_text(text)
        with pytest.raises(DamagedCheckpointError, match=said):
            Lineage.read(str(tmp_path))
