"""The real command, attacked: by another user of the machine, and from another host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from listening import listeners

from parallel2d.files import private_folders as folders

# tools/ stands beside tests/ and is not installed
sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from tools.cluster import Cluster, why_not

NOBODY = 65534
TRAIN = (
    "-m", "parallel2d.train", "model=llama_debug", "train.seq_len=16", "train.global_batch_size=8", "model.n_layers=1",
    "train.validate_every=0", "metrics.console=plain", "metrics.tensorboard=false", "precision=fp64", "scheduler=constant",
    "metrics.log_every=1",
)  # fmt: skip

ATTACK = r"""
import os, pickle, random, socket, sys, time
host, port, marker, seconds = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])

class Runs:
    def __reduce__(self):
        return os.system, (f"touch {marker}",)

random.seed(1)
bomb = pickle.dumps(Runs())
key = b"/torch.rendezvous.parallel2d-0"
messages = [
    b"\x00" + (0x3C85F7CE).to_bytes(4, "little"),  # how torch's own client begins
    b"\x00" + len(key).to_bytes(8, "little") + key + len(bomb).to_bytes(8, "little") + bomb,
    bomb, bomb * 50, b"GET / HTTP/1.0\r\n\r\n", b"\0" * 64, b"\xff" * 4096, os.urandom(64), b"",
]
end, tried = time.monotonic() + seconds, 0
while time.monotonic() < end:
    try:
        with socket.create_connection((host, port), timeout=1) as opened:
            opened.settimeout(0.2)
            opened.sendall(random.choice(messages) + random.choice(messages))
            tried += 1
            try:
                while opened.recv(4096):
                    pass
            except TimeoutError:
                pass
    except OSError:
        time.sleep(0.05)
print(f"attacked {tried} times", flush=True)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
@needs_root
def test_a_folder_that_somebody_else_holds_is_not_used(tmp_path):
    """Where the launcher would keep its records, another user has put one that names a command."""
    shared, marker = tmp_path / "tmp", tmp_path / "ran"
    shared.mkdir()
    shared.chmod(0o1777)
    around = Path(folders.around(str(shared)))
    around.mkdir()
    os.chown(around, NOBODY, NOBODY)
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"} | {
        "TMPDIR": str(shared)
    }
    words = [
        sys.executable,
        *TRAIN,
        "train.steps=1",
        "launch.nproc_per_node=1",
        f"hydra.run.dir={tmp_path}/run",
    ]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert f"{around}: belongs to user {NOBODY}" in ended.stderr
    assert not marker.exists()


@pytest.fixture
def open_place():
    """A temporary folder that every user may write to."""
    place = tempfile.mkdtemp(prefix="parallel2d-test-")
    os.chmod(place, 0o1777)
    yield Path(place)
    shutil.rmtree(place)


def as_nobody(act) -> str:
    """What an OSError says that ``act`` raises when another user does it; empty when it succeeds."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except OSError as error:
            os.write(writer, (error.strerror or "failed").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@needs_root
def test_a_job_on_one_node_opens_no_port_and_its_store_is_private(tmp_path, open_place):
    words = [
        sys.executable,
        *TRAIN,
        "train.steps=100000",
        "launch.nproc_per_node=1",
        f"hydra.run.dir={tmp_path}/run",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"} | {
        "TMPDIR": str(open_place)
    }
    launcher = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        store = wait_for(lambda: next(open_place.glob("parallel2d-*/launcher-*/store"), None))
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        assert listeners(str(launcher.pid)) == set()
        assert as_nobody(lambda: (open_place / "mine").touch()) == ""
        assert (
            as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(str(store)))
            == "Permission denied"
        )
        assert as_nobody(lambda: os.listdir(store.parent)) == "Permission denied"
        assert (
            as_nobody(lambda: store.parent.parent.rename(open_place / "moved"))
            == "Operation not permitted"
        )
    finally:
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130
    assert not list(open_place.glob("parallel2d-*"))


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_nodes_run_with_a_secret_or_without_one_when_told_so(tmp_path):
    words = [*TRAIN, "train.steps=2", "mesh.replicate=2", "strategy=hybrid"]
    secret = tmp_path / "secret"
    subprocess.run([sys.executable, "-m", "parallel2d.launch", "secret", str(secret)], check=True)
    with Cluster(nodes=2, environment={"PARALLEL2D_SECRET": ""}) as cluster:
        for name, added, code in (
            ("refused", [], 2),
            ("file", [f"launch.secret_file={secret}"], 0),
            ("open", ["launch.insecure=true"], 0),
        ):
            run = tmp_path / name
            job = cluster.run(
                [*words, *added, f"hydra.run.dir={run}"], launcher="own", cwd=tmp_path
            )
            assert set(job.wait(timeout=120).values()) == {code}
            assert (run / "metrics.jsonl").exists() == (code == 0)
        assert (cluster.output / "node0.log").read_text().count("need a secret") == 1


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("name", ["node0", "node0.peer"])
def test_somebody_on_the_network_changes_nothing(tmp_path, name):
    """While two nodes meet, train and end, a third host throws pickles and noise at their store."""
    words = [*TRAIN, "train.steps=12", "mesh.replicate=2", "strategy=hybrid"]
    losses = []
    for attacked in (False, True):
        run, marker = tmp_path / f"run-{attacked}", tmp_path / "ran"
        with Cluster(nodes=3, ranks=[1, 1, 1]) as cluster:
            cluster.nodes, intruder = cluster.nodes[:2], cluster.nodes[2]
            host, _, port = cluster.endpoint.rpartition(":")
            if attacked:
                attack = [
                    sys.executable,
                    "-c",
                    ATTACK,
                    host if name == "node0" else name,
                    port,
                    str(marker),
                    "15",
                ]
                thrown = cluster._start(intruder, attack, {}, str(tmp_path))
            job = cluster.run([*words, f"hydra.run.dir={run}"], launcher="own", cwd=tmp_path)
            job.check(timeout=120)
            if attacked:
                assert thrown.wait(60) == 0
                log = (cluster.output / "node0.log").read_text()
                assert log.count("dropped a connection from") == 1
                tried = (cluster.output / "node2.log").read_text()
                assert int(tried.split("attacked ")[1].split()[0]) > 20
        assert not marker.exists()
        losses.append(
            [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]
        )
        assert len(losses[-1]) == 12
    assert losses[0] == losses[1]
