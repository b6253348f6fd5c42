"""The check of a cluster names the node and the cause; its measurements are the input of the
planner.
"""

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from workers import WorkerError

import parallel2d
from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import RankIdentity
from parallel2d.base.runtime import Runtime
from parallel2d.base.topology import Topology
from parallel2d.instruments.planner.layout_cost import cost_of
from parallel2d.instruments.preflight.check import ClusterCheck
from parallel2d.instruments.preflight.verdict import (
    Finding,
    NodeFacts,
    code_digest,
    judge_nodes,
    judge_speeds,
)
from parallel2d.launching.network_interface import choose_interface, is_loopback, list_interfaces
from parallel2d.preflight import main, understand
from tools.cluster import Cluster, why_not

NO_CLUSTER = why_not()


def test_the_interface_is_the_one_that_leads_to_the_endpoint():
    assert choose_interface("127.0.0.1", {}) == ("lo", "127.0.0.1")
    assert choose_interface("localhost", {}).name == "lo"
    # on the node that holds the endpoint: the interface with that address, not loopback
    for interface in list_interfaces():
        assert choose_interface(interface.address, {}) == interface


def test_environment_of_the_user_takes_precedence():
    assert choose_interface("192.0.2.1", {"GLOO_SOCKET_IFNAME": "lo"}) == ("lo", "127.0.0.1")
    assert choose_interface("192.0.2.1", {"NCCL_SOCKET_IFNAME": "=lo"}).name == "lo"
    both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^lo"}
    assert choose_interface("192.0.2.1", both).name == "lo"
    says = r"GLOO_SOCKET_IFNAME=eth77: .* has no such interface .* it has .*lo \(127.0.0.1\)"
    with pytest.raises(ConfigError, match=says):
        choose_interface("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth77"})


def facts(host: str, faults: tuple[Finding, ...] = (), **versions: str) -> NodeFacts:
    required = {"torch": "2.14.1", "GPUs": "none", **versions}
    return NodeFacts(host, 2, required, "cpu", 1 << 34, list(faults))


def told(nodes: list[NodeFacts], clocks: list[float] | None = None) -> list[tuple[str, str]]:
    found = judge_nodes(nodes, clocks or [0.0] * len(nodes))
    return [(finding.level, finding.text) for finding in found]


def test_a_version_or_device_that_differs_names_the_nodes():
    nodes = [facts("node0"), facts("node1", torch="2.15.0"), facts("node2")]
    assert told(nodes) == [("red", "node1: torch 2.15.0, the others 2.14.1")]
    # among equals the value of the first node is the usual value; a missing key differs too
    pair = [facts("node0", nccl="2.27"), facts("node1", GPUs="H100, H100")]
    assert told(pair) == [
        ("red", "node1: GPUs H100, H100, the others none"),
        ("red", "node1: nccl none, the others 2.27"),
    ]
    many = [facts(f"node{k}", torch="2.15.0" if k > 9 else "2.14.1") for k in range(19)]
    assert told(many)[0][1].startswith("node10, node11, node12, node13, node14 ...: torch 2.15.0")
    assert told([facts("node0"), facts("node1")]) == []


def test_node_with_a_wrong_clock_is_named_also_if_it_is_the_first():
    nodes = [facts(f"node{k}") for k in range(4)]
    assert told(nodes, [0.0, 0.01, 3.0, 0.0]) == [
        ("yellow", "node2: +3 s from the others: run NTP or chrony")
    ]
    assert told(nodes, [0.0, -30.0, -30.0, -30.1])[0][1].startswith("node0: +30 s from the others")


def slow(links: dict[tuple[int, int], float], hosts: list[str], flops: list[float] | None = None):
    rows = [(source, target, speed) for (source, target), speed in links.items()]
    found = judge_speeds(hosts, flops or [1e12] * len(hosts), {"replicate": rows})
    return [finding.text for finding in found]


def ring(count: int, speeds: dict[int, float]) -> dict[tuple[int, int], float]:
    """By ends; ``speeds``: of the links that begin at these."""
    return {(k, (k + 1) % count): speeds.get(k, 1e9) for k in range(count)}


@pytest.mark.parametrize("nodes", [3, 4, 9])
def test_the_links_of_a_slow_node_are_named(nodes):
    hosts = [f"node{k}" for k in range(nodes)]
    assert slow(ring(nodes, {0: 1e8, 1: 1e8}), hosts) == [
        "node0 -> node1: 100 MB/s on replicate, 1e+03 is usual",
        "node1 -> node2: 100 MB/s on replicate, 1e+03 is usual",
    ]
    assert slow(ring(nodes, {}), hosts) == []


def test_ranks_of_a_node_share_its_network_link():
    hosts = ["node0", "node0", "node1", "node1"]
    between = {(0, 2): 4e8, (1, 3): 4e8, (2, 0): 1e8, (3, 1): 1e8}
    assert slow(between, hosts) == ["node1 -> node0: 200 MB/s on replicate, 800 is usual"]
    inside = {(0, 1): 4e9, (1, 0): 4e9, (2, 3): 1e9, (3, 2): 4e9}
    text = "rank 2 -> rank 3 on node1: 1e+03 MB/s on replicate, 4e+03 is usual"
    assert slow({**between, **inside}, hosts)[1:] == [text]


def test_a_slow_rank_is_named():
    assert slow({}, ["a", "a", "b"], [2e12, 2e12, 0.5e12]) == [
        "rank 2 on b: 0.5 TFLOP/s, 2 is usual"
    ]


def test_code_digest_changes_with_one_line(tmp_path, monkeypatch):
    before = code_digest()
    copy = copy_of_the_package(tmp_path)
    assert (copy / "models" / "llama.py").is_file()
    monkeypatch.setattr(parallel2d, "__path__", [str(copy)])
    assert code_digest() != before


def copy_of_the_package(folder: Path) -> Path:
    """The package as if installed there, with one line more in one module."""
    target = folder / "parallel2d"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(parallel2d.__path__[0], target, ignore=ignore)
    with (target / "loss.py").open("a") as file:
        file.write("# one line more\n")
    return target


def checked(folder: str, *words: str, own_run_dir: bool = False) -> tuple[int, str]:
    """Return the exit code and the output of this rank. With ``own_run_dir`` the second node sees
    another run directory.
    """
    rank = dist.get_rank()
    os.chdir(folder)
    given, config = understand(
        ["--seconds=0.01", "--largest-mib=0.5", f"--run-dir={folder}/runs", *words], "preflight"
    )
    if own_run_dir and rank > 1:
        given.run_dir = f"{folder}/others"
    identity = RankIdentity(rank, 4, rank % 2, rank // 2, 2, "torchrun")
    hosts = Topology(("node0/1", "node0/1", "node1/2", "node1/2"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = ClusterCheck(Runtime(identity, torch.device("cpu"), hosts), given).run(config)
    return code, said.getvalue()


# On busy cores a larger message may by chance take no longer than a smaller one.
GENEROUS = ("--seconds=0.1", "--largest-mib=2")


@pytest.mark.slow
def test_each_axis_is_measured_and_the_planner_reads_the_file(ranks, tmp_path):
    results = ranks.run(4, checked, str(tmp_path), "--json", "--write=mine.yaml", *GENEROUS)
    assert [code for code, _ in results] == [0] * 4
    assert [said for _, said in results[1:]] == [""] * 3
    found = json.loads(results[0][1])
    assert found["fit"] is True
    assert [node["ranks"] for node in found["nodes"]] == [2, 2]
    assert len(found["flops"]) == 4
    for axis, ends in (("replicate", [[0, 2], [1, 3], [2, 0], [3, 1]]), ("shard", None)):
        names = [collective for collective, *_ in found["axes"][axis]]
        assert set(names) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
        sizes = {whole for _, whole, *_ in found["axes"][axis]}
        assert {4096, 32768} <= sizes <= {4096, 32768, 262144, 2097152}
        measured = sorted(link[:2] for link in found["links"][axis])
        assert measured == (ends or [[0, 1], [1, 0], [2, 3], [3, 2]])
    # Between nodes both groups of the axis share the link, and a reduce-scatter is an all-reduce.
    costs = [sample[:4] for sample in found["axes"]["replicate"]]
    assert ["all_gather", 32768, 1, 2 * 16384] in costs
    assert ["reduce_scatter", 32768, 2, 2 * 32768] in costs

    words = ["plan.verify=false", "launch.insecure=true", f"cluster={tmp_path}/mine.yaml"]
    config = compose([*words, "train.global_batch_size=4"]).config
    cluster = config.cluster
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node) == ("mine", 2, 2)
    assert 0 < cluster.device.efficiency <= 1
    assert cluster.device.peak_tflops.bf16 > 0
    assert cluster.inside_node.bytes_per_s > 0
    assert cost_of(config).time.seconds.total > 0
    (tmp_path / "cluster").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "cluster" / "mine.yaml")
    assert compose(["--config-dir", str(tmp_path), "cluster=mine"]).config.cluster == cluster


def test_unshared_run_dir_fails_preflight(ranks, tmp_path):
    results = ranks.run(4, checked, str(tmp_path), own_run_dir=True)
    assert [code for code, _ in results] == [1] * 4
    assert "FAIL run dir: on " in results[0][1]
    assert results[0][1].splitlines()[-1].startswith("not fit to train: 1 failed")
    assert sorted(os.listdir(tmp_path / "runs")) == []


def test_unmeasurable_links_write_no_cluster_file(ranks, tmp_path):
    words = ("strategy=zero3", "--write=mine.yaml")
    with pytest.raises(WorkerError, match="omit strategy and mesh"):
        ranks.run(4, checked, str(tmp_path), *words)
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=2"], "launch.nnodes=2"),
        (["mesh.shard=two"], "mesh.shard"),
        (["--seconds=0"], "--seconds=0 must be above 0"),
        (["--largest-mib=nan"], "--largest-mib=nan must be from"),
        (["--write=mine.json"], "must end with .yaml"),
        (["--write=none/mine.yaml"], "cannot be written"),
        (["--self-check", "--only=stream"], "--only=stream must be some of streams,fp32,bf16,"),
        (["--only=fp32"], "--only needs --self-check"),
        (["--self-check", "--json"], "--self-check has no --json"),
    ],
)
def test_wrong_arguments_exit_with_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_failed_rendezvous_gives_one_message(capsys, monkeypatch):
    monkeypatch.setattr("parallel2d.preflight.start_server", lambda: None)
    assert main(["--nnodes=2", "--endpoint=nowhere.invalid:1", "--timeout=1"]) == 1
    assert "host name nowhere.invalid does not resolve on" in capsys.readouterr().err
    addresses = [each.address for each in list_interfaces() if ":" not in each.address]
    own = next((address for address in addresses if not is_loopback(address)), None)
    if own is None:
        pytest.skip("this machine has no address beside loopback, where several nodes may not meet")
    assert main(["--nnodes=2", f"--endpoint={own}:0", "--timeout=2"]) == 1
    text = capsys.readouterr().err
    assert f"after 2 s 1 of launch.nnodes=2 nodes were at {own}:0 ({socket.gethostname()})" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_preflight_command_exits_with_the_verdict_of_its_ranks(tmp_path):
    words = ["--nproc=2", "--seconds=0.01", "--largest-mib=0.5", "--run-dir=runs"]
    command = [sys.executable, "-m", "parallel2d.preflight", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "  ok shard: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("fit to train")
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").touch()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "FAIL run dir" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not fit to train: 1 failed")
    assert done.stderr == ""


def drop_connections(cluster: Cluster, source: int, target: int) -> None:
    """Block new connections from node ``source`` to an ephemeral port of node ``target``; all
    other traffic passes. A firewall in the switch silently drops the first packet of a TCP
    connection (SYN without ACK).
    """
    address = int.from_bytes(socket.inet_aton(cluster.nodes[source].address), "big")
    code = [
        "40 0 0 12",
        "21 0 10 2048",  # IPv4
        "48 0 0 23",
        "21 0 8 6",  # TCP
        "32 0 0 26",
        f"21 0 6 {address}",  # from the source
        "48 0 0 47",
        "84 0 0 18",
        "21 0 3 2",  # SYN, not ACK
        "40 0 0 36",
        "53 0 1 32768",  # to an ephemeral port
        "6 0 0 2",
        "6 0 0 4294967295",
    ]
    port = ["dev", cluster.network.links[f"node{target}"].port]
    tc = ["tc", "-n", cluster.network.namespace("switch")]
    filter_words = ["egress", "pref", "7", "protocol", "all", "bpf", "bytecode"]
    bytecode = ",".join([str(len(code)), *code])
    subprocess.run([*tc, "filter", "add", *port, *filter_words, bytecode, "da"], check=True)


def ends_of(cluster: Cluster, nodes: int, folder: Path, *words: str) -> list[int]:
    """Exit codes of ranks, one on each node, that are started as torchrun starts them."""
    processes = []
    for node in range(nodes):
        numbers = {"RANK": node, "GROUP_RANK": node, "LOCAL_RANK": 0}
        numbers |= {"WORLD_SIZE": nodes, "GROUP_WORLD_SIZE": nodes, "MASTER_PORT": 29555}
        environment = {name: str(value) for name, value in numbers.items()}
        environment |= {"MASTER_ADDR": "node0", "OMP_NUM_THREADS": "1"}
        if node == 1:
            environment["PYTHONPATH"] = str(folder / "other")
        command = [sys.executable, "-m", "parallel2d.preflight", *words]
        if node == 2:
            private = f'mount -t tmpfs none {folder}/runs && exec "$@"'
            command = ["sh", "-c", private, "sh", *command]
        processes.append(cluster.start(node, command, environment=environment, cwd=str(folder)))
    return [process.wait(timeout=90) for process in processes]


@pytest.mark.slow
@pytest.mark.skipif(NO_CLUSTER is not None, reason=str(NO_CLUSTER))
def test_report_of_a_broken_cluster_lists_each_node(tmp_path):
    """Four machines: other code on node1, a separate run dir on node2, a slow cable at node3; then
    a firewall.
    """
    copy_of_the_package(tmp_path / "other")
    (tmp_path / "runs").mkdir()
    words = ["--run-dir=runs", "--seconds=0.1", "--largest-mib=1"]
    with Cluster(nodes=4, rate="2gbit") as cluster:
        cluster.set_rate(3, "50mbit")
        assert ends_of(cluster, 4, tmp_path, *words) == [1, 1, 1, 1]
        lines = cluster.log_path(0).read_text().splitlines()
        other = cluster.log_path(3).read_text()
        drop_connections(cluster, 0, 1)
        drop_connections(cluster, 1, 0)
        assert 0 not in ends_of(cluster, 2, tmp_path, *words, "--timeout=10")
        logs = [cluster.log_path(node).read_text() for node in range(2)]
    failed = [line for line in lines if line.startswith("FAIL")]
    assert failed[0].startswith("FAIL versions: node1: parallel2d code ")
    assert failed[1].startswith("FAIL run dir: on node2: ")
    assert len(failed) == 2
    slow = [line.partition(": ")[2] for line in lines if line.startswith("warn links")]
    assert [line.partition(": ")[0] for line in slow] == ["node2 -> node3", "node3 -> node0"]
    # Where four ranks share two cores, one may be found slow too.
    warned = [line.partition(":")[0] for line in lines if line.startswith("warn ")]
    assert set(warned) <= {"warn links", "warn ranks"}
    verdict = f"node3: not fit to train: 2 failed, {len(warned)} warnings (report on node0)"
    assert verdict in other
    told = [line for log in logs for line in log.splitlines() if "gloo" in line.lower()]
    assert len(told) == 1
    assert "Traceback" not in "".join(logs)
