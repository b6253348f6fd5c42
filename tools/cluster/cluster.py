"""`Cluster` creates nodes and links, runs a job on them, and injects faults. It removes everything
when the ``with`` block ends, also after an exception."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from parallel2d.base.store.secret import VARIABLE, new_secret
from tools.cluster import leftovers
from tools.cluster.job import LAUNCHERS, PORT, Job
from tools.cluster.network import (
    DROP_ALL,
    PREFIX,
    ClusterError,
    Counters,
    Network,
    command,
    delete_namespaces,
    parse_rate,
)
from tools.cluster.node import Node, Process, node_environment

STORE = "store"
_STORE_FOR_TORCHRUN = """
import signal, sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print("torch's store listens", flush=True)
signal.pause()
"""


def why_not() -> str | None:
    """Return the reason why this machine cannot run a cluster, in one line; None if it can."""
    if sys.platform != "linux":
        return "nodes are Linux network namespaces; this is not Linux"
    missing = [
        program for program in ("ip", "tc", "unshare", "nsenter") if shutil.which(program) is None
    ]
    if missing:
        return f"nodes need the programs {', '.join(missing)} (iproute2, util-linux), which are not installed here"
    if os.geteuid() != 0:
        return "nodes are network namespaces, and making them needs root"
    tag = f"{os.getpid()}x"
    name = f"{PREFIX}-{tag}-try"
    try:
        command(f"ip netns add {name}")
        try:
            command(f"tc -n {name} qdisc add dev lo root tbf rate 1mbit burst 131072 limit 2097152")
            command(f"tc -n {name} qdisc add dev lo clsact")
            drop = f"protocol all bpf bytecode '{DROP_ALL}' da"
            command(f"tc -n {name} filter add dev lo egress pref 1 {drop}")
        finally:
            delete_namespaces(tag)
    except ClusterError as error:
        return f"this machine cannot make network namespaces with shaped links: {error}"
    return None


class Cluster:
    """Nodes on one machine, joined by a switch.

    Args:
        nodes: number of nodes.
        ranks: workers per node, one number or one per node.
        rate: rate of every node's link in each direction (``200mbit``); None: the speed of the machine.
        store: host of the rendezvous, ``node0`` or ``outside`` (a separate host that no fault of a node affects).
        output: folder for logs and counters; None: a temporary folder that is removed with the cluster.
        environment: variables for every process of every node.
        echo: function that receives every line of output, with the name of the node before it.

    Raises `ClusterError` if the cluster cannot be created.
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks: int | Sequence[int] = 1,
        *,
        rate: str | int | None = None,
        store: str = "node0",
        output: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self.ranks = [ranks] * nodes if isinstance(ranks, int) else list(ranks)
        if not 1 <= nodes <= 200 or len(self.ranks) != nodes or min(self.ranks) < 1:
            raise ClusterError(
                f"nodes={nodes} ranks={ranks}: 1 to 200 nodes, and at least one rank for each"
            )
        if store not in ("node0", "outside"):
            raise ClusterError(f"store={store} must be node0 or outside")
        self.rate = parse_rate(rate)
        self.store_outside = store == "outside"
        self.environment = {VARIABLE: new_secret(), **(environment or {})}
        self.job: Job | None = None
        self.nodes: list[Node] = []
        self.events: list[dict[str, Any]] = []
        self.killed: set[int] = set()  # nodes that a fault has killed and that are not restored yet
        self._names = [f"node{index}" for index in range(nodes)]
        self._output = Path(output) if output is not None else None
        self._echo = echo
        self._logs: dict[str, BinaryIO] = {}
        self._lost_power: set[int] = set()
        self._store: Node | None = None
        self._machines: list[Node] = []  # the nodes and the machine of the store
        self._processes: list[Process] = []
        self._begun = time.monotonic()
        self.tag = ""

    # Start and end

    def __enter__(self) -> Cluster:
        if (reason := why_not()) is not None:
            raise ClusterError(reason)
        hosts = [*self._names, *([STORE] if self.store_outside else [])]
        atexit.register(self.close)
        try:
            self.tag, self._folder, subnet = leftovers.reserve(hosts)
            self.output = self._output or self._folder / "output"
            self.output.mkdir(parents=True, exist_ok=True)
            self.network = Network(self.tag, hosts, subnet)
            self.network.create()
            lines = ["127.0.0.1 localhost"]
            for host, link in self.network.links.items():
                # The second line has the IPv4 address in the form in which IPv6 sockets report it.
                lines += [
                    f"{link.address} {host}",
                    f"::ffff:{link.address} {host}.peer",
                ]
            names = self._folder / "hosts"
            names.write_text("\n".join(lines) + "\n")
            self._machines = [
                Node(
                    host, link.address, self.network.namespace(host), self._folder / "nodes", names
                )
                for host, link in self.network.links.items()
            ]
            self.nodes = self._machines[: len(self._names)]
            self._store = self._machines[-1] if self.store_outside else None
            for machine in self._machines:
                machine.boot()
                self._logs[machine.name] = (self.output / f"{machine.name}.log").open(
                    "wb", buffering=0
                )
            for node in self.nodes:
                self.network.set_rate(node.name, self.rate)
            self._begun = time.monotonic()
            if self._store is not None:
                self._start_store()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of all nodes and remove everything. A second call does nothing."""
        if not self.tag:
            return
        for process in self._processes:
            process.wake()
        for machine in self._machines:
            machine.kill()
        for process in self._processes:
            process.wait()
        for log in self._logs.values():
            log.close()
        leftovers.remove(self.tag)
        self.tag = ""
        atexit.unregister(self.close)

    def _start_store(self) -> None:
        assert self._store is not None
        log = self.output / f"{STORE}.log"
        before = log.stat().st_size
        address = self._store.address
        ours = f"-m parallel2d.launch store --host {address} --port {PORT}".split()
        torchs = ["-c", _STORE_FOR_TORCHRUN, address, str(PORT + 1)]
        processes = [
            self._start(self._store, [sys.executable, *words], {}, os.getcwd())
            for words in (ours, torchs)
        ]
        while log.read_bytes()[before:].count(b"listens") < len(processes):
            for process in processes:
                if process.poll() is not None:
                    said = log.read_text(errors="replace").strip()
                    raise ClusterError(f"the store ended with {process.wait()}: {said}")
            time.sleep(0.05)

    # Running

    def endpoint(self, launcher: str = "own") -> str:
        """Return HOST:PORT of the rendezvous. torchrun needs the store of torch."""
        if not self.store_outside:
            return f"node0:{PORT}"
        return f"{STORE}:{PORT + 1 if launcher == 'torchrun' else PORT}"

    def run(
        self,
        words: Sequence[str],
        *,
        launcher: str = "torchrun",
        min_nodes: int | None = None,
        max_restarts: int | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        late: Sequence[int] = (),
    ) -> Job:
        """Start a job with one launcher on each node, except on the nodes in ``late``.

        Args:
            words: arguments of ``python`` (``["-m", "parallel2d.train", ...]``); with ``launcher="none"`` the complete command.
            launcher: ``torchrun``, ``own`` or ``none``.
            min_nodes: the job continues with this number of nodes; None: all.
            max_restarts: None: the default of the launcher (torchrun: 0).
            environment: variables for the launchers.
            cwd: working directory, for relative paths in ``words``.
            late: nodes whose launcher is not started here; `Job.start` starts it later.
        """
        if launcher not in LAUNCHERS:
            raise ClusterError(f"launcher={launcher} must be one of {', '.join(LAUNCHERS)}")
        if self.job is not None and self.job.is_running():
            raise ClusterError("a job still runs on this cluster")
        options = {
            "nodes": len(self.nodes), "min_nodes": min_nodes or len(self.nodes), "job_id": self.tag, "endpoint": self.endpoint(launcher),
            "max_restarts": max_restarts,
        }  # fmt: skip
        self.job = Job(
            self, words, launcher, options, environment or {}, os.path.abspath(cwd or os.getcwd())
        )
        for node in set(range(len(self.nodes))) - set(late):
            self.job.start(node)
        return self.job

    def start(
        self,
        node: int,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Process:
        """Start a command on a node; its output goes to the node's log."""
        return self._start(self._node(node), words, environment or {}, cwd or os.getcwd())

    def _start(
        self, machine: Node, words: Sequence[str], environment: Mapping[str, str], cwd: str
    ) -> Process:
        variables = node_environment({**self.environment, **environment})
        process = machine.start(words, variables, cwd, lambda line: self._write(machine.name, line))
        self._processes.append(process)
        return process

    def execute(
        self, node: int, words: Sequence[str], *, timeout: float = 60.0, cwd: str | None = None
    ) -> str:
        """Run a command on a node and return its output. Raises `ClusterError` if it fails."""
        lines: list[bytes] = []
        process = self._node(node).start(
            words, node_environment(self.environment), cwd or os.getcwd(), lines.append
        )
        self._processes.append(process)
        code = process.wait(timeout)
        text = b"".join(lines).decode(errors="replace")
        if code:
            raise ClusterError(
                f"{self._node(node).name}: {' '.join(words)} ended with {code}: {text.strip()}"
            )
        return text

    def _node(self, index: int) -> Node:
        if not 0 <= index < len(self.nodes):
            raise ClusterError(f"node={index}: there are nodes 0 to {len(self.nodes) - 1}")
        return self.nodes[index]

    def log_path(self, node: int) -> Path:
        return self.output / f"{self._node(node).name}.log"

    def _write(self, name: str, line: bytes) -> None:
        if not self._logs[name].closed:
            self._logs[name].write(line)
        if self._echo is not None:
            self._echo(f"[{name}] {line.decode(errors='replace').rstrip()}")

    # Counters

    def counters(self) -> Counters:
        """Return ``{"node0": {"eth0": {"tx_bytes", ...}, "lo": {...}}, ...}`` since the start of the cluster. eth0's tx is the uplink."""
        return {node.name: self.network.counters(node.name) for node in self.nodes}

    # Faults

    def _event(self, what: str, **details: Any) -> None:
        seconds = round(time.monotonic() - self._begun, 3)
        self.events.append({"seconds": seconds, "fault": what, **details})
        if self._echo is not None:
            words = " ".join(f"{key}={value}" for key, value in details.items())
            self._echo(f"[cluster] {seconds:8.3f} s  {what} {words}")

    def kill_worker(self, node: int, local_rank: int) -> None:
        """Send SIGKILL to one worker."""
        self._signal_worker(node, local_rank, signal.SIGKILL, "kill-worker")

    def stop_worker(self, node: int, local_rank: int) -> None:
        """Send SIGSTOP to one worker. Like a hanging process, it keeps its connections open and
        does nothing."""
        self._signal_worker(node, local_rank, signal.SIGSTOP, "stop-worker")

    def continue_worker(self, node: int, local_rank: int) -> None:
        self._signal_worker(node, local_rank, signal.SIGCONT, "continue-worker")

    def _signal_worker(self, node: int, local_rank: int, number: int, what: str) -> None:
        os.kill(self._node(node).worker(local_rank), number)
        self._event(what, node=node, rank=local_rank)

    def kill_node(self, node: int, *, power_loss: bool = False) -> None:
        """Kill all processes of the node at the same time. Its shared memory is lost.

        The kernel still closes the connections, which the peers notice. With ``power_loss`` the link is cut first, so that
        nothing reaches the peers.
        """
        machine = self._node(node)
        if not machine.alive:
            raise ClusterError(f"{machine.name} is down already")
        self.killed.add(node)
        if power_loss:
            self.network.cut(machine.name)
            self._lost_power.add(node)
        machine.kill()
        self._event("kill-node", node=node, power_loss=power_loss)

    def restore_node(self, node: int) -> None:
        """Boot a killed node. If the job still runs elsewhere, start its launcher on this node again."""
        machine = self._node(node)
        if machine.alive:
            raise ClusterError(f"{machine.name} is up")
        if node in self._lost_power:
            self.network.renew(machine.name)
            self._lost_power.discard(node)
        machine.boot()
        self.killed.discard(node)
        self._event("restore-node", node=node)
        if self.job is not None and self.job.is_running():
            self.job.start(node)

    def kill_store(self) -> None:
        """Kill the machine of the rendezvous store; the content of the store is lost. Raises `ClusterError` if node 0 has the store."""
        if self._store is None or not self._store.alive:
            raise ClusterError("there is no store outside of the nodes, or it is down already")
        self._store.kill()
        self._event("kill-store")

    def restore_store(self) -> None:
        """Start a new, empty store at the same address."""
        if self._store is None or self._store.alive:
            raise ClusterError("there is no store outside of the nodes, or it is up")
        self._store.boot()
        self._start_store()
        self._event("restore-store")

    def partition(self, node: int) -> None:
        """Drop all packets between this node and the others, in both directions, until `heal`."""
        self.network.cut(self._node(node).name)
        self._event("partition", node=node)

    def heal(self, node: int) -> None:
        """End a partition."""
        if node in self._lost_power:
            raise ClusterError(f"{self._node(node).name} has no power; restore it")
        self.network.heal(self._node(node).name)
        self._event("heal", node=node)

    def set_rate(self, node: int, rate: str | int | None) -> None:
        """Set the rate of this node's link in each direction; None: the speed of the machine."""
        self.network.set_rate(self._node(node).name, rate)
        self._event("rate", node=node, rate=rate)

    def restore_rate(self, node: int) -> None:
        """Set the rate of this node's link to the rate of the cluster."""
        self.set_rate(node, self.rate)

    def set_loss(self, node: int, share: float = 0.0) -> None:
        """Drop this share of the packets on the node's link, in each direction."""
        self.network.set_loss(self._node(node).name, share)
        self._event("loss", node=node, share=share)

    def set_delay(self, node: int, milliseconds: float = 0.0) -> None:
        """Delay the packets on the node's link, in each direction. Raises `ClusterError` on a kernel without netem."""
        self.network.set_delay(self._node(node).name, milliseconds)
        self._event("delay", node=node, milliseconds=milliseconds)
