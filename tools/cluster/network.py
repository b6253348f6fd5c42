"""The network of a cluster: one namespace as switch, one per host, a veth pair between; rate, loss,
delay and cuts of each link. Start at `Network`.

It is built by commands of iproute2. Nothing is ever created in the root namespace. What the kernel
lacks (a queueing discipline, a classifier) is replaced where that is possible and noted in
`Network.limitations`; what cannot be replaced raises `ClusterError`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

PREFIX = "p2d"  # of every namespace: p2d-TAG-HOST
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_CUT, _LOSS = "1", "2"  # priorities of the filters at a switch port

# Classic BPF as `tc filter ... bpf bytecode` takes it. Direct action: 2 drops the packet, -1 hands it to the next filter.
_DROP_ALL = "1,6 0 0 2"
_DROP_SOME = "4,32 0 0 4294963256,53 0 1 {keep_from},6 0 0 4294967295,6 0 0 2"  # ld rand; jge keep_from; ret -1; ret 2


class ClusterError(Exception):
    """What this machine or this cluster cannot do; the message is for a person."""


def parse_rate(rate: str | int | None) -> int | None:
    """``200mbit`` -> 200000000 bits per second; a number is bits per second already. Raises `ClusterError`."""
    if rate is None or isinstance(rate, int):
        return rate
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", rate.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ClusterError(
            f"rate={rate} must be a number and a unit out of bit, kbit, mbit, gbit, such as 200mbit"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def command(*words: str, stdin: str | None = None) -> str:
    """Runs a command and returns its standard output. Raises `ClusterError` with its output."""
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(
            f"{' '.join(words)}{' <<< ' + stdin if stdin else ''}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def namespaces() -> list[str]:
    """Names of all network namespaces of this machine."""
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]


def free_subnet(candidates: Sequence[int], taken: Sequence[str]) -> ipaddress.IPv4Network:
    """The first ``10.x.y.0/24`` (x, y: bytes of a candidate) that overlaps no route of this machine and none of ``taken``."""
    used = [ipaddress.ip_network(subnet) for subnet in taken]
    for route in json.loads(command("ip", "-j", "-4", "route", "show", "table", "all") or "[]"):
        if route["dst"] != "default":
            used.append(ipaddress.ip_network(route["dst"], strict=False))
    for candidate in candidates:
        subnet = ipaddress.IPv4Network(((10 << 24) + (candidate & 0xFFFF) * 256, 24))
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise ClusterError("no subnet 10.x.y.0/24 is free of this machine's routes")


@dataclass
class Link:
    """The cable between one host and its port at the switch, both directions alike."""

    host: str
    address: str
    port: str
    rate: int | None = None  # bits per second
    delay_ms: float = 0.0  # one way
    loss: float = 0.0  # share of packets
    netem_loss: float = 0.0  # the same, where netem does it
    # counters of this host's earlier namespaces
    carried: dict[str, dict[str, int]] = field(default_factory=dict)


class Network:
    """Namespaces and links of one cluster. `create` and `delete` are idempotent together: delete removes whatever exists."""

    def __init__(self, tag: str, hosts: Sequence[str], subnet: ipaddress.IPv4Network) -> None:
        self.tag = tag
        self.subnet = subnet
        self.links = {
            host: Link(host, str(subnet[index + 1]), f"port{index}")
            for index, host in enumerate(hosts)
        }
        self.limitations: list[str] = []

    def namespace(self, host: str) -> str:
        return f"{PREFIX}-{self.tag}-{host}"

    @property
    def _switch(self) -> str:
        return self.namespace("switch")

    def create(self) -> None:
        self._add_namespace(self._switch)
        # A bridge that listens for multicast members also reports to all ports, which would be counted as traffic.
        command(
            "ip", "-n", self._switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0"
        )
        command("ip", "-n", self._switch, "link", "set", "br0", "up")
        for link in self.links.values():
            self._connect(link)

    def _add_namespace(self, namespace: str) -> None:
        command("ip", "netns", "add", namespace)
        # No IPv6: router solicitations and duplicate detection would be counted as traffic.
        off = (
            "for f in all default; do [ ! -e $0/$f ] || echo 1 > $0/$f/disable_ipv6 || exit 1; done"
        )
        command("ip", "netns", "exec", namespace, "sh", "-c", off, "/proc/sys/net/ipv6/conf")

    def _connect(self, link: Link) -> None:
        inside = self.namespace(link.host)
        self._add_namespace(inside)
        number = int(ipaddress.IPv4Address(link.address))
        # a host that is restored keeps its hardware address
        mac = "02:50:" + ":".join(f"{byte:02x}" for byte in number.to_bytes(4, "big"))
        command("ip", "-n", self._switch, "link", "add", link.port, "type", "veth",
                "peer", "name", "eth0", "address", mac, "netns", inside)  # fmt: skip
        command(
            "ip",
            "-n",
            self._switch,
            "-batch",
            "-",
            stdin=f"link set {link.port} master br0\nlink set {link.port} up\n",
        )
        command("ip", "-n", inside, "-batch", "-",
                stdin=f"link set lo up\naddr add {link.address}/{self.subnet.prefixlen} dev eth0\nlink set eth0 up\n")  # fmt: skip
        self._apply_queues(link)

    def renew(self, host: str) -> None:
        """A new namespace for a host that lost its power: no socket of the earlier one is left. Its
        counters go on."""
        link = self.links[host]
        link.carried = self.counters(host)
        command("ip", "-n", self._switch, "link", "del", link.port)
        command("ip", "netns", "del", self.namespace(host))
        self._connect(link)
        if link.loss:
            self.set_loss(host, link.loss)

    def delete(self) -> None:
        delete_namespaces(self.tag)

    def _ends(self, link: Link) -> tuple[tuple[str, str], tuple[str, str]]:
        """(namespace, interface) of the two ends: what the host sends, what the switch sends to it."""
        return (self.namespace(link.host), "eth0"), (self._switch, link.port)

    # Rate and delay: queueing disciplines at both ends.

    def set_rate(self, host: str, rate: str | int | None) -> None:
        """Bits per second in each direction; None: as fast as the machine."""
        self.links[host].rate = parse_rate(rate)
        self._apply_queues(self.links[host])

    def set_delay(self, host: str, milliseconds: float) -> None:
        """Delay in each direction of this link. Raises `ClusterError` on a kernel without netem."""
        before, self.links[host].delay_ms = self.links[host].delay_ms, milliseconds
        try:
            self._apply_queues(self.links[host])
        except ClusterError:
            self.links[host].delay_ms = before
            self._apply_queues(self.links[host])
            raise

    def _apply_queues(self, link: Link) -> None:
        for namespace, device in self._ends(link):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True
            )
            parent = ["root"]
            if link.rate is not None and self._shape(namespace, device, link.rate):
                parent = ["parent", "1:1"]
            if link.delay_ms or link.netem_loss:
                words = [
                    "netem",
                    "delay",
                    f"{link.delay_ms}ms",
                    "loss",
                    f"{100 * link.netem_loss}%",
                    "limit",
                    "100000",
                ]
                try:
                    command(
                        "tc",
                        "-n",
                        namespace,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        *parent,
                        "handle",
                        "10:",
                        *words,
                    )
                except ClusterError as error:
                    raise ClusterError(
                        f"this kernel cannot delay packets (no netem): {error}"
                    ) from None

    def _shape(self, namespace: str, device: str, rate: int) -> bool:
        # A burst above the largest segmentation-offload frame (64 KiB): otherwise the shaper cuts frames into MTU-sized ones and
        # header bytes grow from 0.25 % to 5 %. The queue holds 100 ms, so that a meeting of several senders loses nothing.
        burst, queue = max(128 * 1024, rate // 8 // 250), max(2 * 2**20, rate // 8 // 10)
        start = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "handle", "1:"]
        try:
            command(*start, "tbf", "rate", f"{rate}bit", "burst", str(burst), "limit", str(queue))
            return True
        except ClusterError as tbf_missing:
            try:
                command(*start, "htb", "default", "1")
                command("tc", "-n", namespace, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb",
                        "rate", f"{rate}bit", "burst", str(burst), "cburst", str(burst))  # fmt: skip
                self._note("no tbf in this kernel: links are shaped by htb")
                return True
            except ClusterError as htb_missing:
                subprocess.run(
                    ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"],
                    capture_output=True,
                )
                self._note(
                    f"links are NOT shaped: neither tbf ({tbf_missing}) nor htb ({htb_missing})"
                )
                return False

    def _note(self, text: str) -> None:
        if text not in self.limitations:
            self.limitations.append(text)

    # Cuts and loss: filters at the switch port, where the sender cannot notice.

    def _filter(self, link: Link, priority: str, bytecode: str | None) -> None:
        """Both directions of the port pass ``bytecode`` (None: no longer)."""
        port = ["dev", link.port]
        # it may be there
        subprocess.run(
            ["tc", "-n", self._switch, "qdisc", "add", *port, "clsact"], capture_output=True
        )
        for direction in ("ingress", "egress"):
            where = [*port, direction, "pref", priority]
            subprocess.run(["tc", "-n", self._switch, "filter", "del", *where], capture_output=True)
            if bytecode is not None:
                command(
                    "tc",
                    "-n",
                    self._switch,
                    "filter",
                    "add",
                    *where,
                    "protocol",
                    "all",
                    "bpf",
                    "bytecode",
                    bytecode,
                    "da",
                )

    def cut(self, host: str) -> None:
        """From now on nothing passes this link, in either direction; neither side is notified."""
        link = self.links[host]
        try:
            self._filter(link, _CUT, _DROP_ALL)
        except ClusterError:
            self._note(
                "no BPF classifier in this kernel: a cut link is a port that is down, and the host sees its carrier go"
            )
            command("ip", "-n", self._switch, "link", "set", link.port, "down")

    def heal(self, host: str) -> None:
        link = self.links[host]
        self._filter(link, _CUT, None)
        command("ip", "-n", self._switch, "link", "set", link.port, "up")

    def set_loss(self, host: str, share: float) -> None:
        """Loses this share of the packets (0 to 1) in each direction, at random. A packet is a segmentation-offload frame of up
        to 64 KiB. Raises `ClusterError` on a kernel with neither the BPF classifier nor netem."""
        if not 0 <= share <= 1:
            raise ClusterError(f"loss={share} must lie between 0 and 1")
        link = self.links[host]
        lost = _DROP_SOME.format(keep_from=min(int(share * 2**32), 2**32 - 1))
        try:
            self._filter(link, _LOSS, lost if share else None)
        except ClusterError as error:
            link.netem_loss = share
            try:
                self._apply_queues(link)
            except ClusterError as netem:
                link.netem_loss = 0.0
                self._apply_queues(link)
                raise ClusterError(f"this kernel cannot lose packets: {error}; {netem}") from None
        link.loss = share

    def counters(self, host: str) -> dict[str, dict[str, int]]:
        """``{"eth0": {"tx_bytes", "rx_bytes", "tx_packets", "rx_packets"}, "lo": {...}}`` since `create`, as the kernel counts.
        Bytes are those of Ethernet frames (headers included) of segmentation-offload size."""
        found = {}
        for link in json.loads(
            command("ip", "-n", self.namespace(host), "-s", "-j", "link", "show")
        ):
            if link["ifname"] in ("eth0", "lo"):
                earlier = self.links[host].carried.get(link["ifname"], {})
                found[link["ifname"]] = {
                    f"{way}_{unit}": link["stats64"][way][unit] + earlier.get(f"{way}_{unit}", 0)
                    for way in ("tx", "rx")
                    for unit in ("bytes", "packets")
                }
        return found


def delete_namespaces(tag: str) -> list[str]:
    """Ends what still runs in the namespaces of the cluster ``tag``, removes them and returns their names; cables go with them."""
    mine = [name for name in namespaces() if name.startswith(f"{PREFIX}-{tag}-")]
    for name in mine:
        for pid in command("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        command("ip", "netns", "del", name)
    return mine
