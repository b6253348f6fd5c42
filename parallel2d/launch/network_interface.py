"""Which network interface training uses. The endpoint's host flows in; an interface's name and its
address here flow out.

[Note: which interface] Without being told, gloo takes whatever address this machine's own host name
resolves to (often loopback), and NCCL takes the first interface that is up, in an order of its own.
The interface that leads to the endpoint is the one on which the nodes are known to meet, so that is
the guess; what the user set in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is kept.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from parallel2d.errors import ConfigError
from parallel2d.store.address import resolve

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Interface(NamedTuple):
    """An interface of this machine (``eth0``) and the address on it (``10.0.0.1``, ``fd00::1``)."""

    name: str
    address: str


def choose_interface(endpoint_host: str, environment: Mapping[str, str] | None = None) -> Interface:
    """The interface that gloo and NCCL should use to meet the other nodes, and this machine's
    address on it.

    ``endpoint_host``: the host of the rendezvous endpoint, a name or an address; on that node
    itself, the interface that holds the address. GLOO_SOCKET_IFNAME wins, then NCCL_SOCKET_IFNAME,
    then the route to the endpoint. The address is of the endpoint's family where the interface has
    one. Raises `ConfigError` for an interface that does not exist or has no address, and when no
    interface leads to the endpoint. See [Note: which interface].
    """
    env = os.environ if environment is None else environment
    present = list_interfaces()
    targets = resolve(endpoint_host)
    routed = _routed(endpoint_host, present)
    families = (
        [family for family, _, _ in targets] if routed is None else [_family_of(routed.address)]
    )
    if names := [name.strip() for name in env.get(GLOO, "").split(",") if name.strip()]:
        return _first_with_address(
            GLOO, env[GLOO], [each for each in present if each.name == names[0]], families, present
        )
    if pattern := env.get(NCCL, "").strip():
        allowed = [each for each in present if matches_nccl(pattern, each.name)]
        # several fit: the one that leads to the endpoint
        if routed is not None and routed in allowed:
            return routed
        return _first_with_address(NCCL, pattern, allowed, families, present)
    if routed is None:
        raise ConfigError(
            f"no interface of {socket.gethostname()} leads to the endpoint {endpoint_host} "
            f"({', '.join(sorted({address for _, address, _ in targets}))}); it has "
            f"{_listing(present)}; set {GLOO} and {NCCL}"
        )
    return routed


def choice_reason(endpoint_host: str, environment: Mapping[str, str] | None = None) -> str:
    """Why `choose_interface` takes what it takes, for a message: ``set in GLOO_SOCKET_IFNAME``,
    ``the route to node0``."""
    env = os.environ if environment is None else environment
    for name in (GLOO, NCCL):
        if env.get(name, "").strip():
            return f"set in {name}"
    return f"the route to {endpoint_host}"


def matches_nccl(pattern: str, name: str) -> bool:
    """Whether NCCL would use interface ``name`` under NCCL_SOCKET_IFNAME=``pattern``: ``eth`` is a
    prefix, ``=eth0`` a whole name, ``^docker`` everything but that prefix, ``^=eth3`` everything
    but that name; a comma separates alternatives. (NCCL's user guide, "Environment variables")"""
    exclude = pattern.startswith("^")
    words = pattern.removeprefix("^")
    exact = words.startswith("=")
    listed = [
        word.strip().partition(":")[0]
        for word in words.removeprefix("=").split(",")
        if word.strip()
    ]
    found = any(name == word if exact else name.startswith(word) for word in listed)
    return found != exclude


def list_interfaces() -> list[Interface]:
    """Every address of every interface that is up, IPv4 and IPv6, as the system lists them;
    loopback last."""
    found = [Interface(name, address) for name, address in _getifaddrs()]
    return sorted(dict.fromkeys(found), key=lambda each: is_loopback(each.address))


def is_loopback(address: str) -> bool:
    """Whether an address in numbers stays inside the machine."""
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def _routed(host: str, present: list[Interface]) -> Interface | None:
    """Connecting a datagram socket sends nothing; it asks the kernel for the route and tells the
    source address it would use."""
    by_address = {each.address: each for each in present}
    for family, _, address in resolve(host):
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect((address[0], 9, *address[2:]))
                source = asking.getsockname()
            except OSError:
                continue
        numeric = socket.getnameinfo(source, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
        if numeric in by_address:
            return by_address[numeric]
    return None


def _first_with_address(
    variable: str,
    value: str,
    candidates: list[Interface],
    families: list[socket.AddressFamily],
    present: list[Interface],
) -> Interface:
    for family in families:
        for each in candidates:
            if _family_of(each.address) == family:
                return each
    if candidates:
        return candidates[0]
    raise ConfigError(
        f"{variable}={value}: {socket.gethostname()} has no such interface that is up and has an "
        f"address; it has {_listing(present)}"
    )


def _listing(present: list[Interface]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in present) or "none that is up"


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class _SocketAddress(ctypes.Structure):
    if sys.platform == "linux":
        _fields_ = [("family", ctypes.c_uint16), ("data", ctypes.c_ubyte * 26)]
    else:  # the BSDs put a length first
        _fields_ = [
            ("length", ctypes.c_uint8),
            ("family", ctypes.c_uint8),
            ("data", ctypes.c_ubyte * 26),
        ]


class _InterfaceAddress(ctypes.Structure):
    pass


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
]  # getifaddrs(3); what follows is not read


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _getifaddrs() -> list[tuple[str, str]]:
    head = ctypes.POINTER(_InterfaceAddress)()
    if _libc().getifaddrs(ctypes.byref(head)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found = []
    try:
        entry = head
        while entry:
            item = entry.contents
            entry = item.next
            if not item.address or not item.flags & 1:  # IFF_UP
                continue
            family, data = item.address.contents.family, bytes(item.address.contents.data)
            name = item.name.decode()
            if family == socket.AF_INET:
                found.append((name, socket.inet_ntop(socket.AF_INET, data[2:6])))
            elif family == socket.AF_INET6:
                address = socket.inet_ntop(socket.AF_INET6, data[6:22])
                found.append(
                    (name, f"{address}%{name}" if address.startswith("fe80:") else address)
                )
    finally:
        _libc().freeifaddrs(head)
    return found
