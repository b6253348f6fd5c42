"""The real command, attacked: by another user of the machine, and from another host."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from jobs import wait_for

from parallel2d.base.files import private_folders as folders

# tools/ is next to tests/ and is not installed
sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from tools.cluster import Cluster, Job, why_not

NOBODY = 65534
TRAIN = (
    "-m",
    "parallel2d.train",
    "model=llama_debug",
    "train.seq_len=16",
    "train.global_batch_size=8",
    "model.n_layers=1",
    "train.validate_every=0",
    "metrics.console=plain",
    "metrics.tensorboard=false",
    "precision=fp64",
    "scheduler=constant",
    "metrics.log_every=1",
)

ATTACK = r"""
import os, pickle, random, socket, sys, time
host, port, marker, end = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

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
tried = 0
while not os.path.exists(end):
    try:
        with socket.create_connection((host, port), timeout=1) as opened:
            opened.settimeout(0.2)
            opened.sendall(random.choice(messages) + random.choice(messages))
            tried += 1
            if tried == 10:
                print("attacked 10 times", flush=True)
            try:
                while opened.recv(4096):
                    pass
            except TimeoutError:
                pass
    except OSError:
        time.sleep(0.05)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")


@pytest.mark.slow
@needs_root
def test_shared_folder_of_another_user_is_not_used(tmp_path):
    """Another user has put a record that names a command into the record folder of the launcher."""
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


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_nodes_need_a_secret_and_strangers_change_no_loss(tmp_path):
    """While two nodes meet, train and end, a third host throws pickles and noise at their store."""
    words = [*TRAIN, "train.steps=12", "mesh.replicate=2", "strategy=hybrid"]
    secret, marker, over = tmp_path / "secret", tmp_path / "ran", tmp_path / "over"
    subprocess.run([sys.executable, "-m", "parallel2d.launch", "secret", str(secret)], check=True)
    with Cluster(nodes=3, environment={"PARALLEL2D_SECRET": ""}) as cluster:
        cluster.nodes, intruder = cluster.nodes[:2], cluster.nodes[2]

        def start(name: str, *added: str) -> Job:
            run = [*words, *added, f"hydra.run.dir={tmp_path}/{name}"]
            return cluster.run(run, launcher="own", cwd=tmp_path)

        assert set(start("refused").wait(120).values()) == {2}
        assert (cluster.output / "node0.log").read_text().count("need a secret") == 1
        start("open", "launch.insecure=true").check(180)

        port = cluster.endpoint().rpartition(":")[2]
        attacks = []
        for host in ("node0", "node0.peer"):
            attack = [sys.executable, "-c", ATTACK, host, port, str(marker), str(over)]
            attacks.append(cluster._start(intruder, attack, {}, str(tmp_path)))
        job = start("attacked", f"launch.secret_file={secret}", "train.steps=1000000")
        tried = cluster.output / "node2.log"
        job.wait_for_step(12)
        wait_for(lambda: tried.read_text().count("attacked 10 times") == 2)
        # The store ends with its node: both save, and the other one waits for it.
        job.send_signal(signal.SIGTERM, 0)
        assert job.processes[0].wait(60) == 75, job.tail()
        wait_for(lambda: "the ranks have ended, waiting for it" in job.output(1))
        job.send_signal(signal.SIGTERM, 1)
        assert job.processes[1].wait(60) == 75, job.tail()
        over.touch()
        assert [attack.wait(60) for attack in attacks] == [0, 0]
        log, last = job.output(0), job.step()
        assert all(f"asked to stop; saved step-{last:08}\n" in job.output(node) for node in (0, 1))
    # Once for each address, and both names are one host's.
    assert log.count("dropped a connection from") == 1
    assert not marker.exists()
    losses = [[row["loss"] for row in jobs.rows(tmp_path / name)] for name in ("open", "attacked")]
    assert len(losses[0]) == 12
    assert losses[0] == losses[1][:12]
    assert not (tmp_path / "refused").exists()
