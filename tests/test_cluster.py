"""The cluster tool: names, links, counters, each fault, and that nothing is left; then real
training on its nodes.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import psutil
import pytest

from tools.cluster import (
    Cluster,
    ClusterError,
    difference,
    leftovers,
    parse_fault,
    traffic,
    why_not,
)
from tools.cluster.__main__ import main
from tools.cluster.network import namespaces
from tools.cluster.traffic import theory

ROOT = Path(__file__).resolve().parents[1]
needs_nodes = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# Programs for the nodes. The listener prints one line for each event: LISTENING, then the number
# of bytes and seconds.
LISTEN = """
import socket, sys, time
server = socket.create_server(("", 7000))
print("LISTENING", flush=True)
connection, _ = server.accept()
received, begun = 0, None
while data := connection.recv(1 << 20):
    begun = begun or time.monotonic()
    received += len(data)
    if "each" in sys.argv:
        print("HEARD", received, flush=True)
print("TOTAL", received, time.monotonic() - begun, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
TALK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
try:
    while True:
        connection.sendall(b"x")
        print("SENT", flush=True)
        time.sleep(0.02)
except OSError as error:
    print("ERROR", type(error).__name__, flush=True)
"""
# a launcher that ends with its last worker
WORKERS = "LOCAL_RANK=0 sleep 1000 & LOCAL_RANK=1 sleep 1001 & wait $!"


def python(source: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", source, *map(str, arguments)]


def said(cluster: Cluster, node: int, after: int = 0) -> str:
    return cluster.log_path(node).read_text()[after:]


def await_text(cluster: Cluster, node: int, text: str, after: int = 0) -> int:
    """Wait until the node's log has ``text`` beyond ``after`` characters. Returns the length of
    the log.
    """
    jobs.wait_for(lambda: text in said(cluster, node, after), 20.0)
    return len(said(cluster, node))


def transfer(cluster: Cluster, sender: int, receiver: int, size: int) -> float:
    """Sends ``size`` bytes and returns bytes per second as the receiver saw them."""
    begun = len(said(cluster, receiver))
    listener = cluster.start(receiver, python(LISTEN))
    await_text(cluster, receiver, "LISTENING", begun)
    cluster.execute(sender, python(SEND, f"node{receiver}", size))
    assert listener.wait(20) == 0
    received, seconds = said(cluster, receiver, begun).split("TOTAL")[1].split()[:2]
    assert int(received) == size
    return size / float(seconds)


def conversation(cluster: Cluster) -> None:
    """Node 1 keeps sending a byte at a time to node 0, which tells each that it hears."""
    cluster.start(0, python(LISTEN, "each"))
    await_text(cluster, 0, "LISTENING")
    cluster.start(1, python(TALK, "node0"))
    await_text(cluster, 0, "HEARD")


def sends_on(cluster: Cluster) -> None:
    """Wait until node 1 has sent twenty more messages: its output may accumulate in its kernel."""
    sent = len(said(cluster, 1))
    for _ in range(20):
        sent = await_text(cluster, 1, "SENT", sent)


def root_links() -> str:
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


def reaches_state(pid: int, state: str) -> None:
    """Wait until the process is in this state; signals are delivered late on a busy machine."""
    jobs.wait_for(lambda: psutil.Process(pid).status() == state, 10.0)


def left_of(tag: str) -> list[str]:
    left = [name for name in namespaces() if tag in name] + [
        str(path) for path in leftovers.ROOT.glob(f"*{tag}*")
    ]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join([*process.cmdline(), *process.environ().values()])
            if f"p2d-cluster-{tag}" in words:
                left.append(str(process.pid))
    return left


@needs_nodes
def test_simulated_nodes_have_separate_names_memory_and_a_network():
    before = root_links()
    with Cluster(3) as cluster:
        assert root_links() == before
        names = [cluster.execute(node, ["hostname"]).strip() for node in range(3)]
        assert names == ["node0", "node1", "node2"]
        cluster.execute(0, ["touch", "/dev/shm/mine"])
        assert cluster.execute(0, ["ls", "/dev/shm"]).split() == ["mine"]
        assert cluster.execute(1, ["ls", "/dev/shm"]).split() == []
        folders = {cluster.execute(node, ["sh", "-c", "echo $TMPDIR"]) for node in range(3)}
        assert len(folders) == 3
        transfer(cluster, 2, 0, 1000)
        transfer(cluster, 1, 2, 1000)
        with pytest.raises(ClusterError, match="node1: false ended with 1"):
            cluster.execute(1, ["false"])
        tag = cluster.tag
    assert left_of(tag) == []
    assert root_links() == before


@needs_nodes
def test_traffic_counters_equal_sent_bytes(tmp_path):
    with Cluster(2, output=tmp_path) as cluster:

        def sent(receiver: int, size: int) -> list[dict]:
            begin = cluster.counters()
            transfer(cluster, 0, receiver, size)
            return difference(cluster.counters(), begin)

        # A receiver without a processor for a while gets segments again: the least of three
        # measurements is the number of sent bytes.
        link = min(
            (sent(1, 5_000_000) for _ in range(3)),
            key=lambda each: each["node0"]["eth0"]["tx_bytes"],
        )
        inside = [sent(0, 3_000_000)["node0"] for _ in range(3)]
    # With the headers of packets: 66 bytes for each of 1,448 to 65,160, the fewer the busier the machine is.
    most = 1 + 66 / 1448
    assert 1 < link["node0"]["eth0"]["tx_bytes"] / 5e6 < most
    assert 1 < link["node1"]["eth0"]["rx_bytes"] / 5e6 < most
    assert link["node0"]["eth0"]["rx_bytes"] < 66 / 1448 * 5e6
    assert link["node1"]["eth0"]["tx_bytes"] < 66 / 1448 * 5e6
    assert link["node0"]["lo"]["tx_bytes"] == 0
    assert 1 < min(each["lo"]["tx_bytes"] for each in inside) / 3e6 < most
    assert max(each["eth0"]["tx_bytes"] for each in inside) < 1000


@needs_nodes
def test_workers_are_killed_stopped_and_continued():
    with Cluster(2, ranks=2) as cluster:
        job = cluster.run(["sh", "-c", WORKERS], launcher="none")
        workers: dict[tuple[int, int], int] = {}

        def processes_exist() -> bool:
            """A process has its LOCAL_RANK only once its shell has started it."""
            with contextlib.suppress(ClusterError):
                for node, rank in itertools.product((0, 1), (0, 1)):
                    workers[node, rank] = cluster.nodes[node].worker(rank)
            return len(set(workers.values())) == 4

        jobs.wait_for(processes_exist, 30.0)
        cluster.stop_worker(0, 1)
        reaches_state(workers[0, 1], psutil.STATUS_STOPPED)
        cluster.continue_worker(0, 1)
        reaches_state(workers[0, 1], psutil.STATUS_SLEEPING)
        cluster.kill_worker(1, 1)
        jobs.wait_for(lambda: job.poll()[1] is not None, 30.0)
        assert job.poll() == {0: None, 1: 137}
        for key in ((0, 0), (0, 1), (1, 0)):
            reaches_state(workers[key], psutil.STATUS_SLEEPING)
        says = r"node1 has no worker with local rank 1, only \['0'\]"
        with pytest.raises(ClusterError, match=says):
            cluster.kill_worker(1, 1)
        with pytest.raises(ClusterError, match="node=2: there are nodes 0 to 1"):
            cluster.kill_worker(2, 0)


@needs_nodes
def test_partition_heals_and_killed_node_loses_memory_and_connections():
    with Cluster(3) as cluster:
        conversation(cluster)
        cluster.partition(1)
        sends_on(cluster)  # earlier lines have been read by then
        heard = len(said(cluster, 0))
        sends_on(cluster)
        # one line may have been on its way
        assert "HEARD" not in said(cluster, 0, heard + 20)
        transfer(cluster, 0, 2, 1000)  # the other nodes continue
        cluster.heal(1)
        await_text(cluster, 0, "HEARD", len(said(cluster, 0)))
        assert "ERROR" not in said(cluster, 1)

        cluster.execute(0, ["touch", "/dev/shm/mine"])
        cluster.kill_node(0)
        assert cluster.nodes[0].processes() == []
        # at once, by a reset; a silent peer would be noticed after minutes
        await_text(cluster, 1, "ERROR")
        with pytest.raises(ClusterError, match="node0 is down"):
            cluster.execute(0, ["true"])
        cluster.restore_node(0)
        assert cluster.execute(0, ["ls", "/dev/shm"]) == ""
        transfer(cluster, 1, 0, 1000)


def start_tool(tmp_path: Path, *options: str) -> tuple[subprocess.Popen, str]:
    """Start the tool with nodes that run an endless job; return its tag once the job runs on all
    nodes.
    """
    words = ["run", "--output", str(tmp_path / "out"), *options, "--launcher", "none", "--"]
    words += ["sh", "-c", "echo FOLDER $TMPDIR; sleep 1000 & sleep 1001"]
    command = [sys.executable, "-m", "tools.cluster", *words]
    tool = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    said = ""
    for line in tool.stdout:
        said += line
        if "FOLDER" in said and "started on" in said:
            return tool, said.split("p2d-cluster-")[1].split("/")[0]
    raise AssertionError(f"the tool ended with {tool.wait()}")


@needs_nodes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_removes_nodes_and_processes(tmp_path, number):
    tool, tag = start_tool(tmp_path)
    try:
        assert len(left_of(tag)) > 4
        tool.send_signal(number)
        assert tool.wait(120) == 128 + number
    finally:
        tool.kill()
    assert left_of(tag) == []
    counters = json.loads((tmp_path / "out/counters.json").read_text())
    assert counters["exit_codes"] == {"node0": None, "node1": None}


@needs_nodes
def test_processes_of_a_killed_tool_end_and_clean_removes_its_files(tmp_path):
    tool, tag = start_tool(tmp_path, "--nodes", "3")
    tool.kill()
    tool.wait()
    jobs.wait_for(lambda: not any(name.isdigit() for name in left_of(tag)), 10.0)
    assert (leftovers.ROOT / f"p2d-cluster-{tag}").exists()
    clean = [sys.executable, "-m", "tools.cluster", "clean"]
    assert subprocess.run(clean, cwd=ROOT, capture_output=True).returncode == 0
    assert left_of(tag) == []


@pytest.mark.slow
@needs_nodes
def test_faults_from_the_command_line(tmp_path, capsys):
    words = ["run", "--nodes", "2", "--ranks", "2", "--launcher", "none", "--timeout", "60"]
    words += ["--output", str(tmp_path)]
    for fault in (
        "at=6s kill-worker node=0 rank=1",
        "at=1s kill-node node=1 for=0.2s",
        "at=8s kill-node node=1",
        "at=50s heal node=0",
    ):
        words += ["--fault", fault]
    code = main([*words, "--", "sh", "-c", WORKERS])
    said = capsys.readouterr().out
    # node 0's launcher ended with its worker's code; node 1 was ended by us
    assert code == 137, said
    report = json.loads((tmp_path / "counters.json").read_text())
    faults = sorted(event["fault"] for event in report["events"])
    assert faults == ["kill-node", "kill-node", "kill-worker", "restore-node"]
    assert report["exit_codes"] == {"node0": 137, "node1": -9}
    assert "the job ended before its time came: heal" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "at=3s kill-wroker node=1 rank=0",
            "kill-wroker is not a fault; did you mean kill-worker?",
        ),
        ("at=3s kill-worker node=1", "kill-worker needs rank="),
        ("at=3s partition node=1 rank=0", "partition has no rank=, only node, for"),
        ("at=3s rate node=1 rate=20parsec", "rate=20parsec must be a rate such as 200mbit"),
        ("partition node=1", "say when, at=30s or at=step:20"),
        ("at=soon partition node=1", "at=soon must be seconds (30s) or a step (step:20)"),
        ("at=1s partition heal node=1", "partition and heal are two faults"),
        ("at=1s loss node=1 share=150%", "share=150% must be a share"),
    ],
)
def test_a_mistyped_fault_is_explained(text, message):
    with pytest.raises(ClusterError) as caught:
        parse_fault(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["root", "programs"])
def test_missing_root_or_programs_give_one_line(monkeypatch, capsys, tmp_path, missing):
    if missing == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr("shutil.which", lambda program: program)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--", "-m", "parallel2d.train"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("root" if missing == "root" else "ip, tc, unshare, nsenter") in said


# Training. The sizes: 3.1 million parameters, so that gradients are 99 % of the link's traffic in
# a handful of steps.
SIZES = (
    "model.n_layers=4",
    "model.dim=256",
    "model.hidden_dim=704",
    "precision=fp32",
    "train.seq_len=16",
    "train.steps=8",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "checkpoint.enabled=false",
)


@pytest.mark.slow
@needs_nodes
def test_two_nodes_train_like_one_and_send_the_predicted_bytes(ranks, folder):
    ranks.run(4, jobs.run, str(folder), str(folder / "one"), SIZES, 8)
    with Cluster(2, ranks=2) as cluster:
        words = ["strategy=hybrid", *jobs.SMALL, *SIZES, f"hydra.run.dir={folder / 'two'}"]
        job = cluster.run(["-m", "parallel2d.train", *words], cwd=folder)
        job.check(timeout=150)
        counted = cluster.counters()
    one, two = jobs.rows(folder / "one"), jobs.rows(folder / "two")
    assert [row["step"] for row in two] == list(range(1, 9))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    layout = json.loads((folder / "two/layout.json").read_text())
    assert layout["parameters"] > 3e6
    expected = theory("hybrid", 2, 2) * 4 * layout["parameters"] * 8
    for node in ("node0", "node1"):
        # Heartbeats, retransmissions and headers add to it, more on a busy machine.
        link = counted[node]["eth0"]
        assert expected < link["tx_bytes"] - 66 * link["tx_packets"] < 1.02 * expected


@needs_nodes
@pytest.mark.soak
@pytest.mark.parametrize("nodes", [2, 4])
def test_every_strategy_sends_the_predicted_bytes(tmp_path, nodes):
    losses = traffic.reference_losses(traffic.FEW + 6, tmp_path)
    for strategy in traffic.STRATEGIES:
        found = traffic.measure(strategy, nodes, 2, "200mbit", 6, tmp_path)
        assert found.losses == pytest.approx(losses, rel=1e-5), strategy
        assert found.units == pytest.approx([found.expected] * nodes, rel=0.01), strategy
