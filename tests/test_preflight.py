"""The cluster check names the node and the cause; it listens on one interface only; it measures what is there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from listening import in_table, listeners

from parallel2d.cluster_check.check import NotFit, Request, check
from parallel2d.cluster_check.facts import Facts, code_digest
from parallel2d.cluster_check.judge import NodeReport, judge
from parallel2d.cluster_check.links import Link, slow_links
from parallel2d.cluster_check.meeting import NodeMissing
from parallel2d.cluster_check.outcome import cluster_description, write_cluster_file
from parallel2d.cluster_check.probes import Peer, ProbeServer, bandwidth, reach, round_trips
from parallel2d.cluster_check.schedule import disjoint_rounds, rounds_of
from parallel2d.cluster_check.slurm import defaults_of_launcher, expand_hosts
from parallel2d.config.composition import compose
from parallel2d.errors import ConfigError
from parallel2d.launch.network_interface import choose_interface, list_interfaces, matches_nccl
from parallel2d.preflight import main
from parallel2d.store.address import split_endpoint
from parallel2d.store.secret import NOBODYS
from parallel2d.store.server import StoreServer

# tools/ stands beside tests/ and is not installed
sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from tools.cluster import Cluster, why_not

NO_CLUSTER = why_not()
TOKEN = bytes(range(16))


# The store and the interface


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("node0:29500", ("node0", 29500)),
        ("[fd00::1]:1", ("fd00::1", 1)),
        ("[fe80::1%eth0]:29500", ("fe80::1%eth0", 29500)),
    ],
)
def test_endpoints_are_split(text, parts):
    assert split_endpoint(text) == parts


@pytest.mark.parametrize(
    "text", ["node0", "node0:", ":29500", "node0:65536", "fd00::1", "node0:http"]
)
def test_endpoints_without_host_or_port_are_refused(text):
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        split_endpoint(text)


def test_the_interface_is_the_one_that_leads_to_the_endpoint():
    assert choose_interface("127.0.0.1", {}) == ("lo", "127.0.0.1")
    assert choose_interface("localhost", {}).name == "lo"
    for interface in (
        list_interfaces()
    ):  # on the node that holds the endpoint: the interface with that address, not loopback
        assert choose_interface(interface.address, {}) == interface


def test_what_the_user_set_wins():
    assert choose_interface("192.0.2.1", {"GLOO_SOCKET_IFNAME": "lo"}) == ("lo", "127.0.0.1")
    assert choose_interface("192.0.2.1", {"NCCL_SOCKET_IFNAME": "=lo"}).name == "lo"
    assert (
        choose_interface(
            "192.0.2.1", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^lo"}
        ).name
        == "lo"
    )
    with pytest.raises(
        ConfigError,
        match=r"GLOO_SOCKET_IFNAME=eth77: .* has no such interface .* it has .*lo \(127.0.0.1\)",
    ):
        choose_interface("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth77"})


def test_patterns_of_nccl():
    names = ["lo", "docker0", "eth0", "eth1", "ib0"]

    def chosen(pattern):
        return [name for name in names if matches_nccl(pattern, name)]

    assert chosen("eth") == ["eth0", "eth1"]
    assert chosen("=eth1,ib0") == ["eth1", "ib0"]
    assert chosen("^docker,lo") == ["eth0", "eth1", "ib0"]
    assert chosen("^=eth0") == ["lo", "docker0", "eth1", "ib0"]


# The schedule


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_node_twice_in_a_round(nodes):
    rounds = rounds_of(nodes)
    for pairs in rounds:
        assert max(Counter(node for pair in pairs for node in pair).values()) == 1
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    assert len(rounds) == (nodes - 1 if nodes % 2 == 0 else nodes)


@pytest.mark.parametrize("nodes", [17, 500])
def test_many_nodes_finish_in_a_few_rounds(nodes):
    rounds = rounds_of(nodes)
    assert len(rounds) <= 7
    for pairs in rounds:
        assert max(Counter(node for pair in pairs for node in pair).values()) == 1
    assert {(min(k, (k + 1) % nodes), max(k, (k + 1) % nodes)) for k in range(nodes)} <= {
        pair for each in rounds for pair in each
    }
    met = Counter(node for each in rounds for pair in each for node in pair)
    assert min(met[node] for node in range(nodes)) >= 5


def test_pairs_that_share_a_node_are_measured_one_after_the_other():
    assert disjoint_rounds([(0, 1), (1, 2), (2, 3)]) == [[(0, 1), (2, 3)], [(1, 2)]]


# Probes


def test_probes_measure_a_real_server():
    before = listeners()
    server = ProbeServer("127.0.0.2", TOKEN, 3, clock=lambda: time.time() + 7.0)
    try:
        assert listeners() - before == {in_table("127.0.0.2", server.port)}
        peer = Peer("127.0.0.2", server.port, TOKEN)
        assert reach(peer, 3) is None
        assert "reached node number 3 instead" in reach(peer, 4)
        # a stranger is told nothing
        assert "no answer" in reach(Peer("127.0.0.2", server.port, bytes(16)), 3, timeout_s=0.5)
        trips = round_trips(peer)
        assert abs(trips.clock_offset_s - 7.0) <= trips.latency_s + 1e-3
        assert bandwidth(peer, seconds=0.1) > 1e6
    finally:
        server.close()
    assert "connection refused" in reach(peer, 3, timeout_s=0.5)


# Verdicts


def facts_of(host: str, **changes) -> Facts:
    values = {
        "host": host, "interface": "eth0", "address": "10.0.0.1", "interface_reason": "the route to node0", "interface_variables": {},
        "mtu": 1500, "link_speed_bits_per_s": None, "own_name_addresses": ["10.0.0.1"], "versions": {"torch": "2.13.0"}, "cpus": 8,
        "cpu_name": "cpu", "ram_bytes": 64 << 30, "ram_available_bytes": 60 << 30, "swap_used_bytes": 0, "shm_bytes": 32 << 30,
        "open_files_limit": 65536, "locked_memory_limit": -1, "has_infiniband": False, "gpus": [],
        "run_dir": {"writable": True, "error": None, "free_bytes": 1 << 40, "write_bytes_per_s": 1e9},
    }  # fmt: skip
    return Facts(**{**values, **changes})


def reports_of(count: int, changes: dict[int, dict] | None = None) -> list[NodeReport]:
    changes = changes or {}
    mine = [changes.get(k, {}) for k in range(count)]
    own = {"unreachable", "clock_offset_s", "sees_token", "intra_bandwidth", "gpu_copy_bandwidth"}
    return [
        NodeReport(
            facts_of(
                f"node{k}", **{key: value for key, value in mine[k].items() if key not in own}
            ),
            **{
                "clock_offset_s": 0.0,
                "intra_bandwidth": 4e9,
                **{key: value for key, value in mine[k].items() if key in own},
            },
        )
        for k in range(count)
    ]


def faults(reports, links=(), ranks=None):
    return [
        (finding.level, finding.text)
        for finding in judge(reports, links, ranks)
        if finding.level != "green"
    ]


def links_of(nodes: int, slow: dict[tuple[int, int], float]) -> list[Link]:
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    return [Link(a, b, slow.get((a, b), 1e9), 1e-4) for a, b in pairs]


def test_nodes_that_agree_are_fit():
    assert faults(reports_of(3), links_of(3, {})) == []


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"versions": {"torch": "2.14.0"}}, "red", "node1: torch 2.14.0, the others 2.13.0"),
        ({"own_name_addresses": ["127.0.1.1"]}, "red", "node1: its own host name resolves to 127.0.1.1 there, so gloo"),
        ({"own_name_addresses": []}, "red", "node1: its own host name does not resolve there"),
        ({"mtu": 9000}, "yellow", "node1: MTU 9000, the others 1500"),
        ({"clock_offset_s": -3.0}, "yellow", "node1: clock 3 s ahead of the others"),
        ({"sees_token": False}, "red", "node1: does not see what node0 writes there"),
        ({"run_dir": {"writable": False, "error": "Read-only file system"}}, "red", "node1: not writable (Read-only file system)"),
        ({"run_dir": {"writable": True, "free_bytes": 1 << 20, "write_bytes_per_s": 1e9}}, "red", "node1: 1 MiB free"),
        ({"run_dir": {"writable": True, "free_bytes": 1 << 40, "write_bytes_per_s": 1e6}}, "yellow", "node1: writes at 1 MB/s"),
        ({"shm_bytes": 64 << 20}, "yellow", "node1: /dev/shm has 64 MiB"),
        ({"open_files_limit": 256}, "red", "node1: at most 256 open files (ulimit -n), about 352 are needed"),
        ({"ram_available_bytes": 1 << 30}, "yellow", "node1: 1 GiB of 64 GiB RAM available"),
        ({"has_infiniband": True, "locked_memory_limit": 65536}, "yellow", "node1: at most 64 KiB of locked memory"),
        ({"gpus": [{"name": "H100", "memory_bytes": 1, "free_bytes": 1}] * 8}, "red", "node1: GPUs: 8 x H100, the others none"),
        ({"intra_bandwidth": 1e9}, "yellow", "node1: 1 GB/s between its processes, 4 GB/s is usual here"),
        ({"unreachable": {2: "connection timed out"}}, "red", "node1 -> node2: connection timed out"),
    ],
)  # fmt: skip
def test_a_fault_names_the_node_and_the_cause(changes, level, words):
    found = faults(reports_of(3, {1: changes}), links_of(3, {}), ranks=8)
    assert len(found) == 1
    assert found[0][0] == level
    assert words in found[0][1]


def test_a_named_interface_disarms_a_host_name_on_loopback():
    trap = {
        "own_name_addresses": ["127.0.1.1"],
        "interface_variables": {"GLOO_SOCKET_IFNAME": "eth0"},
    }
    assert faults(reports_of(2, {1: trap}), links_of(2, {})) == []


def test_two_ranks_may_not_share_a_gpu_and_a_used_gpu_is_named():
    gpu = {"name": "H100", "memory_bytes": 80 << 30, "free_bytes": 80 << 30}
    reports = reports_of(2, {0: {"gpus": [gpu]}, 1: {"gpus": [{**gpu, "free_bytes": 40 << 30}]}})
    assert faults(reports, ranks=2) == [
        ("red", "node0: 1 GPUs for --nproc=2; two ranks cannot share one"),
        ("red", "node1: 1 GPUs for --nproc=2; two ranks cannot share one"),
        ("yellow", "node1: GPU 0 has 40 GiB of 80 GiB free: somebody uses it"),
    ]


def test_a_wrong_clock_on_node_0_accuses_node_0():
    reports = reports_of(4, {k: {"clock_offset_s": 30.0} for k in (1, 2, 3)})
    assert [text.split(";")[0] for _, text in faults(reports, links_of(4, {}))] == [
        "node0: clock 30 s ahead of the others"
    ]


@pytest.mark.parametrize("nodes", [3, 4, 9])
def test_a_node_whose_links_are_all_slow_is_accused_not_its_peers(nodes):
    slow = {pair: 1e8 for k in range(nodes) if k != 1 for pair in ((1, k), (k, 1))}
    found = faults(reports_of(nodes), links_of(nodes, slow))
    assert len(found) == 1
    assert found[0][1].startswith(
        "node1: sends at 100 MB/s and receives at 100 MB/s, the usual here is 1 GB/s"
    )


def test_what_looks_slow_or_late_is_measured_again_and_the_better_figure_counts():
    slow = {pair: 1e8 for k in (0, 2) for pair in ((1, k), (k, 1))}  # four of six links
    assert {(link.source, link.target) for link in slow_links(links_of(3, slow))} == set(slow)
    late = [*links_of(3, {})[1:], Link(0, 1, 1e9, 5e-3)]
    assert [(link.source, link.target) for link in slow_links(late)] == [(0, 1)]
    assert Link(0, 1, 1e8, 1e-4).better_of(Link(0, 1, 1e9, 2e-4)) == Link(0, 1, 1e9, 1e-4)
    assert Link(0, 1, 1e8, 1e-4).better_of(None) == Link(0, 1, 1e8, 1e-4)
    assert faults(reports_of(3), late) == [
        ("yellow", "node0 -> node1: 5 ms one way, 100 us is usual")
    ]


def test_a_node_that_only_sends_slowly_is_told_from_one_slow_link():
    sending = faults(reports_of(4), links_of(4, {(1, k): 1e8 for k in (0, 2, 3)}))
    assert [text.split(",")[0] for _, text in sending] == ["node1: sends at 100 MB/s"]
    one = faults(reports_of(4), links_of(4, {(1, 2): 1e8}))
    assert one == [("yellow", "node1 -> node2: 100 MB/s, the usual here is 1 GB/s")]


def test_a_node_that_nobody_reaches_is_told_once():
    reports = reports_of(4, {k: {"unreachable": {2: "connection timed out"}} for k in (0, 1, 3)})
    found = faults(reports, links_of(4, {}))
    assert len(found) == 1
    assert found[0][1].startswith("* -> node2: connection timed out; no node can connect")


# Launchers


def test_host_lists_of_slurm_are_written_out():
    assert expand_hosts("gpu[08-10,2],cpu1,r[1-2]n[3,5]") == [
        "gpu08",
        "gpu09",
        "gpu10",
        "gpu2",
        "cpu1",
        "r1n3",
        "r1n5",
        "r2n3",
        "r2n5",
    ]
    assert expand_hosts("node0") == ["node0"]


def test_under_srun_nothing_needs_to_be_typed():
    env = {
        "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[01-02]",
    }  # fmt: skip
    known = defaults_of_launcher(env)
    assert (known["nodes"], known["node"], known["endpoint"]) == (2, 1, "gpu01:20119")
    assert known["expected"] == ("gpu01", "gpu02")
    with pytest.raises(ConfigError, match="--ntasks-per-node=1"):
        defaults_of_launcher({**env, "SLURM_STEP_NUM_TASKS": "4"})
    assert defaults_of_launcher({}) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=2"], "--nnodes=2 needs --endpoint HOST:PORT"),
        (["--nnodes=2", "--endpoint=node0"], "endpoint=node0 must be HOST:PORT"),
        (
            ["--nnodes=2", "--endpoint=node0:1", "--node-rank=2"],
            "--node-rank=2 must be from 0 to 1",
        ),
        (["--nnodes=0"], "--nnodes=0 must be at least 1"),
        (["--timeout=0"], "--timeout=0 must be above 0"),
    ],
)
def test_wrong_arguments_end_with_2(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


# Whole checks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def run_nodes(count: int, run_dir: Path, **changes):
    port = free_port()
    requests = [
        Request(
            nodes=count,
            endpoint=f"127.0.0.1:{port}",
            node=k,
            run_dir=str(run_dir),
            timeout_s=20,
            seconds=0.1,
            **changes,
        )
        for k in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(check, requests))


def test_a_whole_check_measures_every_link_and_writes_the_cluster_file(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = listeners()
    seen: set[str] = set()
    done = threading.Event()

    def watch():
        while not done.wait(0.02):
            seen.update(listeners() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcomes = run_nodes(3, tmp_path)
    done.set()
    watcher.join()
    first = outcomes[0]
    assert seen
    # no other interface listens
    assert {address.split(":")[0] for address in seen} == {in_table("127.0.0.1", 0).split(":")[0]}
    assert all(outcome.findings == first.findings for outcome in outcomes)
    assert sorted((link.source, link.target) for link in first.links) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert all(link.bandwidth > 1e6 and 0 < link.latency < 1 for link in first.links)
    assert all(
        report.sees_token and abs(report.clock_offset_s or 0.0) < 1 for report in first.reports
    )
    assert os.listdir(tmp_path) == []  # neither the token nor the written test file is left

    write_cluster_file(str(tmp_path / "mine.yaml"), first, ranks_per_node=2)
    written = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert written == cluster_description(first, "mine", 2)
    assert (written["nodes"], written["ranks_per_node"], len(written["hosts"])) == (3, 2, 3)
    measured = sorted(link.bandwidth for link in first.links)
    assert measured[0] <= written["inter_node"]["bandwidth_bytes_per_s"] <= measured[-1] + 1
    assert written["intra_node"]["latency_s"] > 0
    # The planner reads what the check has written.
    planned = compose([f"cluster={tmp_path}/mine.yaml", "cluster.device.peak_tflops.bf16=5"])
    cluster = planned.config.cluster
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node) == ("mine", 3, 2)
    assert cluster.device.name == written["device"]["name"]
    assert cluster.device.memory_gib == pytest.approx(written["device"]["memory_bytes"] / 2**30)
    assert cluster.device.peak_tflops.bf16 == 5
    for link, key in ((cluster.inside_node, "intra_node"), (cluster.between_nodes, "inter_node")):
        assert link.bytes_per_s == pytest.approx(written[key]["bandwidth_bytes_per_s"])
        assert link.latency_us == pytest.approx(written[key]["latency_s"] * 1e6)


def test_a_missing_node_is_named_by_those_who_came(tmp_path):
    port = free_port()

    def one(node):
        request = Request(
            3,
            f"127.0.0.1:{port}",
            node,
            None,
            str(tmp_path),
            timeout_s=1,
            expected=("gpu1", "gpu2", "gpu3"),
        )
        with pytest.raises(NodeMissing) as caught:
            check(request)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(one, (0, 1)):
            assert message.startswith(
                "gpu3 (node 2 of 3) did not come to the endpoint within 1 s; present: "
            )
            # an endpoint on loopback is a likely reason
            assert "no other machine can reach" in message


def test_a_number_that_is_given_twice_is_refused(tmp_path):
    server = StoreServer.at("127.0.0.1", 0, NOBODYS)
    request = Request(2, server.address, 1, None, str(tmp_path), timeout_s=1)
    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception() for future in [pool.submit(check, request) for _ in range(2)]]
    assert {type(error) for error in errors} == {ConfigError, NodeMissing}
    assert any("--node-rank=1 is taken" in str(error) for error in errors)
    server.close()


def test_a_node_that_cannot_reach_the_endpoint_says_why(tmp_path, monkeypatch):
    # as on another machine
    monkeypatch.setattr("parallel2d.cluster_check.check.owns_address", lambda host: False)
    with pytest.raises(
        NotFit, match="cannot reach the endpoint 127.0.0.1:1 within 0.3 s: connection refused"
    ):
        check(Request(2, "127.0.0.1:1", 1, None, str(tmp_path), timeout_s=0.3))
    monkeypatch.undo()
    with pytest.raises(NotFit, match="host name nowhere.invalid does not resolve on"):
        check(Request(2, "nowhere.invalid:1", 1, None, str(tmp_path), timeout_s=0.3))


def test_the_digest_sees_one_changed_line(tmp_path):
    import parallel2d

    other = copy_of_the_package(tmp_path)
    assert (other / "models" / "llama.py").is_file()
    code = "from parallel2d.cluster_check.facts import code_digest as d; print(d())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(parallel2d.__path__[0]) != other
    assert told != code_digest()


def copy_of_the_package(folder: Path) -> Path:
    """The package as if installed there, with one line more in one module."""
    import parallel2d

    target = folder / "parallel2d"
    ignore = shutil.ignore_patterns("__pycache__")
    # Links to folders become folders, as in an installed wheel.
    shutil.copytree(parallel2d.__path__[0], target, ignore=ignore)
    with (target / "loss.py").open("a") as file:
        file.write("# one line more\n")
    return target


def drop_connections(cluster: Cluster, source: int, target: int) -> None:
    """From now on no connection from node ``source`` to an ephemeral port of node ``target`` gets through; all else does. A
    firewall in the switch: the first packet of a TCP connection (SYN without ACK) is dropped without a word."""
    address = int.from_bytes(socket.inet_aton(cluster.addresses[source]), "big")
    code = [
        "40 0 0 12", "21 0 10 2048",  # IPv4
        "48 0 0 23", "21 0 8 6",  # TCP
        "32 0 0 26", f"21 0 6 {address}",  # from the source
        "48 0 0 47", "84 0 0 18", "21 0 3 2",  # SYN, not ACK
        "40 0 0 36", "53 0 1 32768",  # to an ephemeral port
        "6 0 0 2", "6 0 0 4294967295",
    ]  # fmt: skip
    port = ["dev", cluster.network.links[f"node{target}"].port]
    tc = ["tc", "-n", cluster.network.namespace("switch")]
    subprocess.run([*tc, "qdisc", "add", *port, "clsact"], check=True)
    words = [
        "egress",
        "pref",
        "7",
        "protocol",
        "all",
        "bpf",
        "bytecode",
        ",".join([str(len(code)), *code]),
        "da",
    ]
    subprocess.run([*tc, "filter", "add", *port, *words], check=True)


@pytest.mark.slow
@pytest.mark.skipif(NO_CLUSTER is not None, reason=str(NO_CLUSTER))
def test_a_broken_cluster_is_described_node_by_node(tmp_path):
    """Four machines: other code on node1, a firewall from node0 to node2, a slow cable at node3."""
    copy_of_the_package(tmp_path / "other")
    run_dir = tmp_path / "runs"
    run_dir.mkdir()
    words = [
        sys.executable, "-m", "parallel2d.preflight", "--nnodes=4", "--endpoint=node0:29555", f"--run-dir={run_dir}", "--json",
        "--seconds=0.2",
    ]  # fmt: skip
    with Cluster(nodes=4, rate="2gbit") as cluster:
        cluster.set_rate(3, "50mbit")
        drop_connections(cluster, 0, 2)
        processes = []
        for node in range(4):
            environment = {"PYTHONPATH": str(tmp_path / "other")} if node == 1 else {}
            command = [*words, f"--node-rank={node}"]
            processes.append(
                cluster.start(node, command, environment=environment, cwd=str(tmp_path))
            )
        assert [process.wait(timeout=90) for process in processes] == [1, 1, 1, 1]
        logs = [cluster.log_path(node).read_text() for node in range(4)]
    told = json.loads(next(line for line in logs[0].splitlines() if line.startswith("{")))
    red = [finding["text"] for finding in told["findings"] if finding["level"] == "red"]
    assert red[0].startswith("node1: parallel2d code ")
    assert red[1].startswith("node0 -> node2: connection timed out")
    assert len(red) == 2
    slow = [finding for finding in told["findings"] if finding["check"] == "links"]
    assert [finding["nodes"] for finding in slow] == [[3]]
    assert slow[0]["text"].startswith("node3: sends at ")
    rates = {(link["source"], link["target"]): link["bandwidth"] for link in told["links"]}
    assert rates[1, 3] < 10e6  # 50 Mbit/s are 6.25 MB/s
    assert rates[1, 2] > 12.5e6
    assert (0, 2) not in rates  # it could only have hung
    assert "node1: parallel2d code" in logs[1]
    assert "node0 -> node2" in logs[2]
