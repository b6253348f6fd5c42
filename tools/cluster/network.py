"""The network of a cluster. One namespace is the switch; each host has a namespace, which a veth
pair connects to the switch. Each link has a rate, loss and delay, and can be cut. Start at
`Network`.

The network is built with commands of iproute2. The root namespace is not changed. If the kernel
lacks a feature (a queueing discipline or a classifier), `ClusterError` is raised.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

PREFIX = "p2d"  # of every namespace: p2d-TAG-HOST
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_CUT, _LOSS = 1, 2  # priorities of the filters at a switch port

# Classic BPF in the format of `tc filter ... bpf bytecode`. The return value is the action: 2 drops
# the packet, -1 passes it to the next filter.
DROP_ALL = "1,6 0 0 2"
_DROP_SOME = "4,32 0 0 4294963256,53 0 1 {keep_from},6 0 0 4294967295,6 0 0 2"  # ld rand; jge keep_from; ret -1; ret 2

# node -> interface (eth0, lo) -> {tx,rx}_{bytes,packets}
Counters = dict[str, dict[str, dict[str, int]]]


class ClusterError(Exception):
    """The machine or the cluster does not support an operation. The message is shown to the
    user."""


def parse_rate(rate: str | int | None) -> int | None:
    """Convert a text such as ``200mbit`` to bits per second (200000000). Numbers and None are
    returned unchanged. Raises `ClusterError` for other texts."""
    if rate is None or isinstance(rate, int):
        return rate
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", rate.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ClusterError(
            f"rate={rate} must be a number and a unit out of bit, kbit, mbit, gbit, such as 200mbit"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def difference(after: Counters, before: Counters) -> Counters:
    """Return the difference of two snapshots of the counters."""
    return {
        node: {
            device: {key: value - before[node][device][key] for key, value in counts.items()}
            for device, counts in devices.items()
        }
        for node, devices in after.items()
    }


def command(words: str, stdin: str | None = None) -> str:
    """Run a command and return its standard output. Raises `ClusterError` with its output."""
    done = subprocess.run(shlex.split(words), input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{words}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """Return the names of all network namespaces of this machine."""
    return [line.split()[0] for line in command("ip netns list").splitlines() if line.strip()]


def free_subnet(candidates: Sequence[int], taken: Sequence[str]) -> ipaddress.IPv4Network:
    """Return the first ``10.x.y.0/24`` (x, y: bytes of a candidate) without overlap with ``taken`` or a route of this machine."""
    used = [ipaddress.ip_network(subnet) for subnet in taken]
    for route in json.loads(command("ip -j -4 route show table all") or "[]"):
        if route["dst"] != "default":
            used.append(ipaddress.ip_network(route["dst"], strict=False))
    for candidate in candidates:
        subnet = ipaddress.IPv4Network(((10 << 24) + (candidate & 0xFFFF) * 256, 24))
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise ClusterError("no subnet 10.x.y.0/24 is free of this machine's routes")


@dataclass
class Link:
    """The connection between a host and its port at the switch. The settings apply to both
    directions."""

    host: str
    address: str
    port: str
    rate: int | None = None  # bits per second
    delay_ms: float = 0.0  # one way
    loss: float = 0.0  # share of packets
    # Counters from earlier namespaces of this host
    carried: dict[str, dict[str, int]] = field(default_factory=dict)


class Network:
    """Namespaces and links of one cluster; `delete_namespaces` removes them."""

    def __init__(self, tag: str, hosts: Sequence[str], subnet: ipaddress.IPv4Network) -> None:
        self.tag = tag
        self.subnet = subnet
        self.links = {
            host: Link(host, str(subnet[index + 1]), f"port{index}")
            for index, host in enumerate(hosts)
        }

    def namespace(self, host: str) -> str:
        return f"{PREFIX}-{self.tag}-{host}"

    @property
    def _switch(self) -> str:
        return self.namespace("switch")

    def create(self) -> None:
        self._add_namespace(self._switch)
        # Without multicast snooping: the bridge would send reports to all ports, which would be
        # counted as traffic.
        command(f"ip -n {self._switch} link add br0 type bridge mcast_snooping 0")
        command(f"ip -n {self._switch} link set br0 up")
        for link in self.links.values():
            self._connect(link)

    def _add_namespace(self, namespace: str) -> None:
        command(f"ip netns add {namespace}")
        # No IPv6: router solicitations and duplicate detection would be counted as traffic.
        off = (
            "for f in all default; do [ ! -e $0/$f ] || echo 1 > $0/$f/disable_ipv6 || exit 1; done"
        )
        command(f"ip netns exec {namespace} sh -c '{off}' /proc/sys/net/ipv6/conf")

    def _connect(self, link: Link) -> None:
        inside = self.namespace(link.host)
        self._add_namespace(inside)
        # Derived from the IP address, so that a restored host has the same hardware address.
        mac = "02:50:" + ipaddress.IPv4Address(link.address).packed.hex(":")
        port, address = link.port, f"{link.address}/{self.subnet.prefixlen}"
        command(
            f"ip -n {self._switch} link add {port} type veth peer name eth0 address {mac} netns {inside}"
        )
        command(
            f"ip -n {self._switch} -batch -",
            f"link set {port} master br0\nlink set {port} up\n",
        )
        command(
            f"ip -n {inside} -batch -",
            f"link set lo up\naddr add {address} dev eth0\nlink set eth0 up\n",
        )
        # the filters of cuts and losses are attached to this qdisc
        command(f"tc -n {self._switch} qdisc add dev {port} clsact")
        self._apply_queues(link)

    def renew(self, host: str) -> None:
        """Create a new namespace for a host after a power loss, without any old socket; its counters
        continue."""
        link = self.links[host]
        link.carried = self.counters(host)
        command(f"ip -n {self._switch} link del {link.port}")
        command(f"ip netns del {self.namespace(host)}")
        self._connect(link)
        if link.loss:
            self.set_loss(host, link.loss)

    # Rate and delay: queueing disciplines at both ends.

    def set_rate(self, host: str, rate: str | int | None) -> None:
        """Set the bits per second in each direction; None: the speed of the machine."""
        self.links[host].rate = parse_rate(rate)
        self._apply_queues(self.links[host])

    def set_delay(self, host: str, milliseconds: float) -> None:
        """Set the delay in each direction. Raises `ClusterError` on a kernel without netem."""
        before, self.links[host].delay_ms = self.links[host].delay_ms, milliseconds
        try:
            self._apply_queues(self.links[host])
        except ClusterError as error:
            self.links[host].delay_ms = before
            self._apply_queues(self.links[host])
            raise ClusterError(f"this kernel cannot delay packets (no netem): {error}") from None

    def _apply_queues(self, link: Link) -> None:
        # Both directions: from the host, and from the switch to the host
        for namespace, device in ((self.namespace(link.host), "eth0"), (self._switch, link.port)):
            with contextlib.suppress(ClusterError):  # there may be none
                command(f"tc -n {namespace} qdisc del dev {device} root")
            add = f"tc -n {namespace} qdisc add dev {device}"
            parent = "root"
            if link.rate is not None:
                # A burst above the largest segmentation-offload frame (64 KiB): otherwise the shaper cuts frames into MTU-sized
                # ones and header bytes grow from 0.25 % to 5 %. The queue holds 100 ms, so that several senders lose nothing.
                burst = max(128 * 1024, link.rate // 8 // 250)
                queue = max(2 * 2**20, link.rate // 8 // 10)
                command(f"{add} root handle 1: tbf rate {link.rate}bit burst {burst} limit {queue}")
                parent = "parent 1:1"
            if link.delay_ms:
                command(f"{add} {parent} handle 10: netem delay {link.delay_ms}ms limit 100000")

    # Cuts and loss: filters at the switch port, where the sender cannot notice.

    def _filter(self, link: Link, priority: int, bytecode: str | None) -> None:
        """Attach ``bytecode`` to both directions of the port; None: detach it."""
        for direction in ("ingress", "egress"):
            where = f"dev {link.port} {direction} pref {priority}"
            with contextlib.suppress(ClusterError):  # there may be none
                command(f"tc -n {self._switch} filter del {where}")
            if bytecode is not None:
                program = f"protocol all bpf bytecode '{bytecode}' da"
                command(f"tc -n {self._switch} filter add {where} {program}")

    def cut(self, host: str) -> None:
        """Drop all packets of this link in both directions, without notifying either side."""
        self._filter(self.links[host], _CUT, DROP_ALL)

    def heal(self, host: str) -> None:
        self._filter(self.links[host], _CUT, None)

    def set_loss(self, host: str, share: float) -> None:
        """Drop this share of the packets (0 to 1) in each direction, at random. A packet is a segmentation-offload frame of up to
        64 KiB."""
        if not 0 <= share <= 1:
            raise ClusterError(f"loss={share} must lie between 0 and 1")
        lost = _DROP_SOME.format(keep_from=min(int(share * 2**32), 2**32 - 1))
        self._filter(self.links[host], _LOSS, lost if share else None)
        self.links[host].loss = share

    def counters(self, host: str) -> dict[str, dict[str, int]]:
        """Return ``{"eth0": {"tx_bytes", "rx_bytes", "tx_packets", "rx_packets"}, "lo": {...}}`` since `create`.

        The kernel counts the bytes of Ethernet frames (with headers) of segmentation-offload size.
        """
        found = {}
        for link in json.loads(command(f"ip -n {self.namespace(host)} -s -j link show")):
            if link["ifname"] in ("eth0", "lo"):
                counts = {
                    f"{way}_{unit}": link["stats64"][way][unit]
                    for way in ("tx", "rx")
                    for unit in ("bytes", "packets")
                }
                for key, value in self.links[host].carried.get(link["ifname"], {}).items():
                    counts[key] += value
                found[link["ifname"]] = counts
        return found


def delete_namespaces(tag: str) -> list[str]:
    """Kill the processes in the namespaces of the cluster ``tag``, remove the namespaces with their cables, return their names."""
    mine = [name for name in namespaces() if name.startswith(f"{PREFIX}-{tag}-")]
    for name in mine:
        for pid in command(f"ip netns pids {name}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        command(f"ip netns del {name}")
    return mine
