"""Listening ports of a process, from the kernel's tables."""

import os
import socket
import sys
from pathlib import Path


def listeners(process: str = "self") -> set[str]:
    inodes = set()
    for entry in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1])
    return found


def in_table(host: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])
