"""The whole check on one node, the same sequence on every node: `check`.

The nodes meet, collect their facts, try to reach the others, measure the links and hand in the
results. Node 0 judges them and sends the findings to all. All nodes take the same steps in the same
order, so a node that stops is noticed, by name, at the next meeting point.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parallel2d.cluster_check.facts import Facts, gpu_copy_bandwidth, probe_run_dir
from parallel2d.cluster_check.finding import Finding
from parallel2d.cluster_check.judge import NodeReport, judge
from parallel2d.cluster_check.links import Link, slow_links
from parallel2d.cluster_check.meeting import NodeMissing, PreflightMeeting
from parallel2d.cluster_check.probes import (
    TOKEN_BYTES,
    Peer,
    ProbeServer,
    bandwidth,
    reach,
    round_trips,
)
from parallel2d.cluster_check.schedule import Round, disjoint_rounds, rounds_of
from parallel2d.errors import ConfigError
from parallel2d.launch.network_interface import (
    Interface,
    choice_reason,
    choose_interface,
    is_loopback,
)
from parallel2d.store.address import (
    PortTaken,
    connection_failure,
    join_endpoint,
    owns_address,
    resolve,
    split_endpoint,
)
from parallel2d.store.secret import find_secret

_REACH_S, _REACHING_AT_ONCE = 5.0, 128
_FILE_APPEARS_WITHIN_S = 3.0  # NFS clients cache for a while that a file was not there
_ROUND_S = 20.0  # what one measurement may take at most


class NotFit(Exception):  # noqa: N818 (named after what happened)
    """The check could not be carried out on this node, and neither could a training run; the
    message has the reason."""


@dataclass(frozen=True)
class Request:
    """The arguments of `check`.

    ``endpoint``: HOST:PORT where the nodes meet; None for one node. ``node``: this node's number,
    None to be given one. ``ranks_per_node``: None takes one per GPU. ``name``: tells apart the
    checks that share an outside store. ``expected``: host names by number, as far as known
    beforehand. ``seconds``: how long a link is measured in each direction. ``torchrun``: the
    endpoint is torchrun's own store. ``secret_file``: of the job; without it and without
    PARALLEL2D_SECRET everybody may take part.
    """

    nodes: int = 1
    endpoint: str | None = None
    node: int | None = None
    ranks_per_node: int | None = None
    run_dir: str = "."
    timeout_s: float = 60.0
    seconds: float = 0.3
    name: str = "0"
    expected: tuple[str, ...] = ()
    torchrun: bool = False
    secret_file: str | None = None


@dataclass(frozen=True)
class CheckOutcome:
    """The result, on every node. ``reports`` and ``links`` only on node 0."""

    node: int
    findings: list[Finding]
    reports: list[NodeReport]
    links: list[Link]

    @property
    def fit(self) -> bool:
        return all(finding.level != "red" for finding in self.findings)

    @property
    def flawless(self) -> bool:
        return all(finding.level == "green" for finding in self.findings)


def check(request: Request) -> CheckOutcome:
    """Raises `NotFit` when this node cannot take part, `NodeMissing` when others do not, both with
    what to look at; `ConfigError` for arguments that contradict those of other nodes."""
    try:
        found = meet(request)
    except ConfigError as error:
        raise NotFit(str(error)) from None
    with joined(found, request) as (meeting, facts):
        return _take_part(meeting, facts, request)


class MetStore(NamedTuple):
    """The store at which the nodes meet, and its server if this process holds it."""

    host: str
    port: int
    interface: Interface
    store: Any
    server: Any


def meet(request: Request) -> MetStore:
    """Raises `ConfigError` for an endpoint that cannot be used, `NotFit` for a store that is
    gone."""
    host, port = split_endpoint(request.endpoint) if request.endpoint else ("127.0.0.1", 0)
    with _gone_explained(host, port):
        interface = choose_interface(host)
        return MetStore(host, port, interface, *meet_at(host, port, request))


@contextlib.contextmanager
def joined(found: MetStore, request: Request) -> Iterator[tuple[PreflightMeeting, Facts]]:
    """The meeting, when all nodes are there, and this node's facts; leaves the meeting afterwards.
    What the store and other nodes raise becomes `NotFit` and `NodeMissing` with what to look at."""
    with _gone_explained(found.host, found.port):
        facts = Facts.collect(found.interface, choice_reason(found.host))
        meeting = PreflightMeeting(
            found.store,
            request.nodes,
            facts.host,
            request.node,
            request.name,
            request.timeout_s,
            request.expected,
        )
        try:
            meeting.wait_for_all()
            yield meeting, facts
        except NodeMissing as missing:
            raise NodeMissing(f"{missing}{_loopback_trap(found.host)}") from None
        finally:
            meeting.leave(found.server is not None)
            if found.server is not None:
                found.server.close()


@contextlib.contextmanager
def _gone_explained(host: str, port: int) -> Iterator[None]:
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError:
        raise NotFit(
            f"the store at {host}:{port} is gone: look at the node that holds this address"
        ) from None


def meet_at(host: str, port: int, request: Request) -> tuple[Any, Any]:
    """The store, and its server if this process holds it: the node that owns the endpoint's address
    does, unless one listens there already."""
    from torch.distributed import rendezvous

    from parallel2d.store.client import StoreClient
    from parallel2d.store.server import StoreServer

    if request.torchrun:
        return next(iter(rendezvous("env://")))[0], None
    secret = find_secret(request.secret_file, insecure=True)
    server = None
    if owns_address(host):
        with contextlib.suppress(PortTaken):
            server = StoreServer.at(host, port, secret)
    address = server.address if server else join_endpoint(host, port)
    return StoreClient(address, secret, timeout_s=request.timeout_s), server


def _loopback_trap(host: str) -> str:
    addresses = [address for _, address, _ in resolve(host)]
    if not all(is_loopback(address) for address in addresses):
        return ""
    return (
        f"; on {socket.gethostname()} the endpoint's host {host} is the loopback address "
        f"{addresses[0]}, which no other machine can reach: give an address of the network, or "
        "correct /etc/hosts"
    )


def _report_of(offer: dict[str, Any], look: dict[str, Any]) -> NodeReport:
    """From what one node handed in: its facts, then what it saw of the others."""
    unreachable = {int(node): reason for node, reason in look.pop("unreachable").items()}
    return NodeReport(Facts(**offer["facts"]), unreachable, **look)


def _take_part(meeting: PreflightMeeting, facts: Facts, request: Request) -> CheckOutcome:
    token = bytes.fromhex(
        meeting.tell(secrets.token_hex(TOKEN_BYTES) if meeting.node == 0 else None)
    )
    facts.run_dir = probe_run_dir(request.run_dir)
    server = ProbeServer(facts.address, token, meeting.node)
    try:
        with _token_file(request.run_dir, meeting) as token_name:
            everyone = meeting.gather(
                "facts", {"facts": asdict(facts), "port": server.port}, wait_s=60.0
            )
            book = (
                [[each["facts"]["address"], each["port"]] for each in everyone]
                if everyone
                else None
            )
            book, token_name = meeting.tell([book, token_name], wait_s=60.0)
            peers = {
                node: Peer(address, port, token, source=facts.address)
                for node, (address, port) in enumerate(book)
                if node != meeting.node
            }
            mine = _look_around(peers, request, token_name, server.address)
            wait_s = 30.0 + _REACH_S * (len(peers) // _REACHING_AT_ONCE + 1)
            looks = meeting.gather("reachability", mine, wait_s)
            meeting.together(wait_s)  # the token file stays until everyone has looked
        reports = []
        if everyone and looks:
            reports = list(map(_report_of, everyone, looks))
        links = _measure_links(meeting, peers, reports, request.seconds)
    finally:
        server.close()
    findings = judge(reports, links, request.ranks_per_node) if reports else []
    told = meeting.tell([asdict(finding) for finding in findings])
    return CheckOutcome(meeting.node, [Finding(**finding) for finding in told], reports, links)


@contextlib.contextmanager
def _token_file(run_dir: str, meeting: PreflightMeeting) -> Iterator[str]:
    """A file that node 0 makes and every node must see, if the run directory is shared."""
    path = Path(run_dir) / f".preflight-{uuid.uuid4().hex}"
    try:
        if meeting.node == 0:
            with contextlib.suppress(OSError):  # not writable: `probe_run_dir` has reported that
                path.touch()
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def _look_around(
    peers: dict[int, Peer], request: Request, token_name: str, address: str
) -> dict[str, Any]:
    with ThreadPoolExecutor(_REACHING_AT_ONCE) as pool:
        answers = dict(
            zip(
                peers,
                pool.map(lambda item: reach(item[1], item[0], _REACH_S), peers.items()),
                strict=True,
            )
        )
    offset = error = None
    if 0 in peers and answers[0] is None:
        with contextlib.suppress(OSError):
            trips = round_trips(peers[0])
            offset, error = trips.clock_offset_s, trips.latency_s
    rate, latency = _inside_node(address, request.seconds)
    return {
        "unreachable": {node: reason for node, reason in answers.items() if reason is not None},
        "clock_offset_s": offset,
        "clock_error_s": error,
        "sees_token": _appears(request.run_dir, token_name),
        "intra_bandwidth": rate,
        "intra_latency": latency,
        "gpu_copy_bandwidth": gpu_copy_bandwidth(),
    }


def _appears(folder: str, name: str) -> bool:
    deadline = time.monotonic() + _FILE_APPEARS_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            # a listing is read from the server; a look at one name may come from a cache
            if name in os.listdir(folder):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _inside_node(address: str, seconds: float) -> tuple[float | None, float | None]:
    """Bytes per second and latency from this process to another one on the node."""
    token = secrets.token_bytes(TOKEN_BYTES)
    code = (
        "from parallel2d.cluster_check.probes import serve_until_input_ends as serve; "
        f"serve({address!r}, {token.hex()!r}, 0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        port = other.stdout.readline().strip()
        try:
            if not port:
                return None, None
            peer = Peer(address, int(port), token)
            latency = round_trips(peer).latency_s
            return bandwidth(peer, seconds), latency
        except OSError:
            return None, None
        finally:
            other.stdin.close()


def _measure_links(
    meeting: PreflightMeeting, peers: dict[int, Peer], reports: list[NodeReport], seconds: float
) -> list[Link]:
    """Every scheduled pair in both directions; what looks slow once more, so that a neighbour's
    burst is not taken for a slow link. Links on node 0, an empty list elsewhere."""
    blocked = {
        pair
        for node, report in enumerate(reports)
        for other in report.unreachable
        for pair in ((node, other), (other, node))
    }
    rounds = [[pair for pair in each if pair not in blocked] for each in rounds_of(len(reports))]
    rounds = meeting.tell(rounds, wait_s=_ROUND_S)
    links = _measure_rounds(meeting, peers, rounds, seconds)
    suspects = {
        (min(link.source, link.target), max(link.source, link.target)) for link in slow_links(links)
    }
    again = meeting.tell(disjoint_rounds(sorted(suspects)), wait_s=_ROUND_S)
    second = {
        (link.source, link.target): link for link in _measure_rounds(meeting, peers, again, seconds)
    }
    return [link.better_of(second.get((link.source, link.target))) for link in links]


def _measure_rounds(
    meeting: PreflightMeeting, peers: dict[int, Peer], rounds: Sequence[Round], seconds: float
) -> list[Link]:
    mine: list[Link] = []
    for pairs in rounds:
        for direction in (0, 1):
            meeting.together(wait_s=_ROUND_S)
            for pair in pairs:
                if pair[direction] == meeting.node:
                    mine.append(
                        _measure(
                            peers[pair[1 - direction]], meeting.node, pair[1 - direction], seconds
                        )
                    )
    everyone = meeting.gather("links", [asdict(link) for link in mine], wait_s=_ROUND_S) or []
    return [Link(**link) for links in everyone for link in links]


def _measure(peer: Peer, source: int, target: int, seconds: float) -> Link:
    try:
        latency = round_trips(peer).latency_s
        return Link(source, target, bandwidth(peer, seconds), latency)
    except OSError as error:
        return Link(source, target, None, None, connection_failure(error))
