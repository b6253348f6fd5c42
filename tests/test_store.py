"""The store of ranks and nodes: its service for clients with the secret, and attacks by other
clients.
"""

import os
import pickle
import random
import socket
import stat
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from jobs import wait_for
from listening import in_table, listeners

from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.store import channel as channel_module
from parallel2d.base.store import secret as secrets
from parallel2d.base.store import server as server_module
from parallel2d.base.store.address import PortTaken
from parallel2d.base.store.channel import ANSWER, CODE, GREETING, HELLO, NUMBER, Channel
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.server import StoreServer
from parallel2d.launch import main
from parallel2d.launching import rendezvous
from parallel2d.launching.failures import WorkersFailed
from parallel2d.launching.rendezvous_round import State

SECRET = "the members of this job know this"


@pytest.fixture
def strangers():
    return []


@pytest.fixture
def server(request, strangers):
    address = getattr(request, "param", "127.0.0.1")
    server = StoreServer.at(address, 0, SECRET, strangers.append)
    yield server
    server.close()


on_both = pytest.mark.parametrize("server", ["127.0.0.1", "::1"], indirect=True)


@pytest.fixture
def client(server):
    client = StoreClient(server.address, SECRET, timeout_s=60)
    yield client
    client.close()


def connection(server: StoreServer) -> socket.socket:
    host = server.address.rpartition(":")[0].strip("[]")
    return socket.create_connection((host, server.port), timeout=10)


def member(server: StoreServer) -> tuple[socket.socket, Channel]:
    """An authenticated connection; the test chooses its next messages."""
    opened = connection(server)
    hello = receive(opened, HELLO)
    own = os.urandom(NUMBER)
    channel = Channel(SECRET, hello[len(GREETING) :], own, server=False)
    opened.sendall(own + channel.proof)
    channel.check(receive(opened, CODE))
    return opened, channel


def receive(opened: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = opened.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def is_dropped(opened: socket.socket) -> bool:
    with opened:
        try:
            return opened.recv(1) == b""
        except ConnectionResetError:
            return True


def test_store_listens_on_its_address_only_and_explains_a_wrong_address():
    before = listeners()
    server = StoreServer.at("127.0.0.2", 0, SECRET)
    assert listeners() - before == {in_table("127.0.0.2", server.port)}
    with pytest.raises(ConfigError, match="127.0.0.1:.*connection refused"):
        StoreClient(f"127.0.0.1:{server.port}", SECRET, timeout_s=0.3)
    with pytest.raises(PortTaken, match=f"port {server.port} on 127.0.0.2 is in use"):
        StoreServer.at("127.0.0.2", server.port, SECRET)
    with pytest.raises(ConfigError, match="192.0.2.77 is not an address of"):
        StoreServer.at("192.0.2.77", 0, SECRET)
    with pytest.raises(ConfigError, match="host name nowhere.invalid does not resolve"):
        StoreServer.at("nowhere.invalid", 0, SECRET)
    server.close()
    assert listeners() == before


def test_on_one_node_no_port_is_opened(tmp_path):
    folder = tmp_path / ("a" * 120)  # longer than the path of a Unix socket may be
    folder.mkdir()
    before = listeners()
    with_store = rendezvous.own_rendezvous(str(folder))
    with_store.store.set("key", "value")
    assert with_store.store.get("key") == b"value"
    assert listeners() == before
    with_store.close()


def raised_late(act, *arguments) -> str:
    try:
        act(*arguments)
    except dist.DistStoreError:
        return "late"
    return "in time"


def exercised(store: dist.Store) -> list[object]:
    long, short = timedelta(seconds=60), timedelta(milliseconds=50)
    store.set("a", "1")
    store.set("bytes", bytes(range(256)))
    told: list[object] = [store.get("a"), store.get("bytes")]
    told += [store.check(["a", "bytes"]), store.check(["a", "z"]), store.check([])]
    told += [store.add("n", 5), store.add("n", -7), store.get("n"), store.add("a", 1)]
    told += [store.compare_set("c", "", "first"), store.compare_set("c", "other", "second")]
    told += [store.compare_set("c", "first", "2")]
    told += [store.compare_set("missing", "expected", "new"), store.check(["missing"])]
    store.append("t", "x")
    store.append("t", "yz")
    store.multi_set(["p", "q"], ["P", ""])
    told += [store.get("t"), store.multi_get(["p", "q"])]
    told += [store.delete_key("p"), store.delete_key("p"), store.check(["p"])]
    store.wait(["a", "q"])
    store.wait(["a", "q"], long)
    told.append(raised_late(store.wait, ["never"], short))
    store.set_timeout(short)
    told.append(raised_late(store.get, "never"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["later", "latest"], long)
        store.set("later", "")
        time.sleep(0.05)
        told.append(waiting.done())
        store.set("latest", "")
        waiting.result(timeout=60)
    return told


@on_both
def test_store_answers_as_tcp_store(client):
    assert exercised(client) == exercised(dist.HashStore())
    assert exercised(dist.PrefixStore("below", client)) == exercised(
        dist.PrefixStore("below", dist.HashStore())
    )
    count = client.num_keys()
    client.delete_all("below/")
    assert 0 < client.num_keys() < count
    assert client.get("t") == b"xyz"


def test_a_key_that_is_deleted_while_others_are_waited_for_is_waited_for_again(client):
    with ThreadPoolExecutor(2) as pool:
        client.set("first", "1")
        values = pool.submit(client.multi_get, ["first", "second"])
        time.sleep(0.1)
        client.delete_key("first")
        client.set("second", "2")
        time.sleep(0.1)
        assert not values.done()
        client.set("first", "3")
        assert values.result(timeout=60) == [b"3", b"2"]


def test_oversized_answer_ends_only_its_connection(server, client, monkeypatch):
    monkeypatch.setattr(channel_module, "LARGEST_FRAME", 1000)
    client.set("a", "x" * 600)
    with pytest.raises(dist.DistNetworkError, match="connection was closed"):
        client.multi_get(["a", "a"])
    assert client.get("a") == b"x" * 600
    with pytest.raises(ValueError, match="more than a store takes at once"):
        client.set("key", bytes(1000))


def test_member_with_unread_answers_is_not_served(server, client):
    value = os.urandom(1 << 20)
    client.set("key", value)
    opened, channel = member(server)
    requests = b"".join(channel.seal([b"get", b"1000", b"key"]) for _ in range(100))
    opened.sendall(requests)

    def unsent() -> int:
        keys = list(server._selector.get_map().values())
        return max(len(key.data.outbox) for key in keys if key.data)

    wait_for(lambda: unsent() > 1 << 20)
    client.get("key")  # the others are served meanwhile
    assert unsent() < 4 << 20
    for _ in range(100):
        header = receive(opened, channel_module.HEADER)
        content = receive(opened, channel_module.frame_length(header))
        assert channel.open(header, content) == [b"ok", value]
    opened.close()


def test_waits_of_closed_or_repeated_requests_end_and_long_waits_continue(server, client):
    opened, channel = member(server)
    opened.sendall(channel.seal([b"wait", str(40 * 86_400_000).encode(), b"never"]))
    wait_for(lambda: b"never" in server._waiting)
    opened.close()
    wait_for(lambda: b"never" not in server._waiting)
    opened, channel = member(server)
    opened.sendall(channel.seal([b"get", b"60000", b"never"]) + channel.seal([b"count"]))
    assert is_dropped(opened)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, ["soon"], timedelta(days=40_000))
        assert client.add("n", 1) == 1
        client.set("soon", "")
        waiting.result(timeout=60)


def test_data_of_unauthenticated_clients_is_not_stored(server, client):
    for number in range(200):
        opened = connection(server)
        if number % 2:
            opened.sendall(bytes(1 << 16))
        # closing sends a reset
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        opened.close()
    wait_for(lambda: not server._unproven)
    assert not server._deadlines
    assert client.add("n", 1) == 1


def test_unauthenticated_connections_are_closed_for_members_without_descriptors():
    words = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
from parallel2d.base.store.server import StoreServer
server = StoreServer.at("127.0.0.1", 0, sys.argv[1])
print(server.port, flush=True)
sys.stdin.read(1)
open("/dev/null").close()  # this process may still open files
print("well", flush=True)
"""
    command, pipe = [sys.executable, "-c", words, SECRET], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    port = int(process.stdout.readline())
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]
    client = StoreClient(f"127.0.0.1:{port}", SECRET, timeout_s=60)
    assert client.add("n", 1) == 1
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "well\n"
    process.kill()
    process.wait()
    for each in held:
        each.close()
    client.close()


def test_request_is_retried_while_the_store_restarts():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def end_one_and_begin_another() -> StoreServer:
            listener.accept()[0].close()
            listener.close()
            return StoreServer.at("127.0.0.1", port, SECRET)

        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(end_one_and_begin_another)
            client = StoreClient(f"127.0.0.1:{port}", SECRET, timeout_s=10)
    assert client.add("n", 1) == 1
    client.close()
    with pytest.raises(dist.DistNetworkError, match="was closed"):
        client.add("n", 1)
    begun.result().close()


def test_a_store_that_has_ended_is_not_waited_for(tmp_path):
    for server in (
        StoreServer.at("127.0.0.1", 0, SECRET),
        StoreServer.within(str(tmp_path), SECRET),
    ):
        client, begin = StoreClient(server.address, SECRET), time.monotonic()
        server.close()
        for _ in range(2):  # the second time on a new connection
            with pytest.raises(dist.DistNetworkError):
                client.add("n", 1)
        assert time.monotonic() < begin + 10
        client.close()


def test_malformed_requests_are_answered(server, client):
    opened, channel = member(server)
    wrong = [[], [b"run"], [b"set", b"key"], [b"add", b"n", b"one"], [b"get"], [b"get", b"x", b"y"]]
    for request in [*wrong, [b"check"] * 3]:
        opened.sendall(channel.seal(request))
        header = receive(opened, 36)
        answer = channel.open(header, receive(opened, int.from_bytes(header[:4], "big")))
        assert answer[0] == (b"ok" if request[:1] == [b"check"] else b"error")
    assert not server._waiting
    opened.close()
    assert not client.check(["key"])
    client.set("text", "no number")
    with pytest.raises(ValueError, match="invalid literal"):
        client.add("text", 1)
    server.close()
    with pytest.raises(dist.DistNetworkError, match="the store at .*connection"):
        client.get("text")  # the store has ended, and is not late


@on_both
def test_client_without_the_secret_is_refused(server, client, strangers):
    client.set("key", "value")
    with pytest.raises(ConfigError, match="does not take this node's secret"):
        StoreClient(server.address, "of another job, but as long as it")
    assert strangers == [server.address.rpartition(":")[0].strip("[]")]
    for message in (b"GET / HTTP/1.1\r\n\r\n" * 4, bytes(ANSWER), pickle.dumps(os.getcwd) * 9):
        opened = connection(server)
        receive(opened, HELLO)
        opened.sendall(message)
        assert is_dropped(opened)
    assert len(strangers) == 1, "told once by address"
    assert client.get("key") == b"value"


def test_store_without_the_secret_is_refused():
    others = StoreServer.at("127.0.0.1", 0, "the secret of somebody else's job")
    with pytest.raises(ConfigError, match="does not take this node's secret"):
        StoreClient(others.address, SECRET)
    others.close()

    def pretend() -> None:
        opened, _ = listener.accept()
        with opened:
            opened.sendall(GREETING + os.urandom(NUMBER))
            receive(opened, ANSWER)
            opened.sendall(bytes(CODE))
            opened.recv(1)

    says = "does not know this job's secret: it belongs to another job"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend)
        with pytest.raises(ConfigError, match=says):
            StoreClient(f"127.0.0.1:{listener.getsockname()[1]}", SECRET)
        pretending.result()


def test_replayed_proofs_and_frames_are_refused(server, client):
    first, channel = member(server)
    frame = channel.seal([b"set", b"key", b"value"])
    first.sendall(frame)
    wait_for(lambda: client.check(["key"]))
    client.delete_key("key")
    second, _ = member(server)
    second.sendall(frame)
    assert is_dropped(second)
    first.close()
    third = connection(server)
    hello = receive(third, HELLO)
    third.sendall(
        hello[len(GREETING) :]
        + Channel(SECRET, hello[len(GREETING) :], hello[len(GREETING) :], server=True).proof
    )
    assert is_dropped(third), "the server's own proof is not the client's"
    assert not client.check(["key"])


def test_two_hundred_forged_frames_are_refused(server, client):
    """Forged, replayed and cut frames: each ends its connection, and no frame is executed."""
    random.seed(1)
    client.set("count", "0")
    for number in range(200):
        opened, channel = member(server)
        frames = [
            channel.seal([b"add", b"count", b"0"]),
            channel.seal([b"set", b"bad-%d" % number, b"x" * number]),
        ]
        kind = number % 4
        if kind == 0:  # forged: some bits of the second are others
            changed = bytearray(frames[1])
            changed[random.randrange(4, len(changed))] ^= 1 << random.randrange(8)
            opened.sendall(frames[0] + changed)
        elif kind == 1:  # replayed
            opened.sendall(frames[0] + frames[0])
        elif kind == 2:  # cut, and the rest is never sent
            opened.sendall(frames[0] + frames[1][: random.randrange(len(frames[1]))])
            opened.shutdown(socket.SHUT_WR)
        else:  # another length: shorter, much longer
            length = random.choice([0, 1, len(frames[1]) - 37, 1 << 28, (1 << 32) - 1])
            opened.sendall(frames[0] + length.to_bytes(4, "big") + frames[1][4:])
            opened.shutdown(socket.SHUT_WR)
        with opened, opened.makefile("rb") as pipe:
            answers = pipe.read()
        assert len(answers) in (0, 36 + 4 + 2 + 4 + 1), "at most the answer to the first"
    assert client.get("count") == b"0"
    assert server._values == {b"count": b"0"}


def test_silent_connections_are_dropped(server, client, strangers, monkeypatch):
    monkeypatch.setattr(server_module, "_PROOF_S", 0.2)
    monkeypatch.setattr(server_module, "_UNPROVEN", 20)
    held = [connection(server) for _ in range(50)]
    assert client.add("n", 1) == 1
    for each in held:
        each.settimeout(10)
        with pytest.raises(EOFError):
            receive(each, HELLO + 1)
        each.close()
    assert strangers == []


def test_invalid_rendezvous_state_is_refused():
    damaged = [b"\x80\x04]\x94.", b"[]", b"{}", b'"text"', b"[" * 100_000, b"nan", b"\xff"]
    for state in [*damaged, b'["", [["here", "me", 1.5, 2, 3]], [], ""]', b'[1, [], [], ""]']:
        with pytest.raises(WorkersFailed, match="the state of the rendezvous is damaged"):
            State.from_text(state)


def test_secret_is_created_and_refused_if_readable_by_others(tmp_path, capsys, monkeypatch):
    path, pipe = tmp_path / "secret", tmp_path / "pipe"
    assert main(["secret", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(secrets.read_secret(str(path))) == 64
    assert main(["secret", str(path)]) == 2
    assert f"parallel2d: {path}: File exists" in capsys.readouterr().err
    assert main(["secret"]) == 0
    assert len(capsys.readouterr().out.strip()) == 64
    os.mkfifo(pipe)

    def refused(path, says):
        with pytest.raises(ConfigError, match=says):
            secrets.read_secret(str(path))

    path.chmod(0o640)
    refused(path, f"launch.secret_file={path} can be read by others: chmod 600")
    path.chmod(0o600)
    known = os.stat(path)
    cases = ((7, 0o600, "belongs to user 7"), (0, 0o640, None), (0, 0o644, "by others"))
    for owner, mode, says in cases:
        status = os.stat_result((stat.S_IFREG | mode, *known[1:4], owner, *known[5:]))
        with monkeypatch.context() as patched:
            patched.setattr(os, "getuid", lambda: 12345)
            patched.setattr(os, "fstat", lambda _, status=status: status)
            if says:
                refused(path, says)
            else:  # root mounts it for a container
                assert len(secrets.read_secret(str(path))) == 64
    path.write_text("short\n")
    refused(path, "a secret has 32 to 4096 characters, this has 5")
    refused(tmp_path / "nowhere", "No such file")
    refused(pipe, "not a regular file")


def test_several_nodes_need_a_secret(monkeypatch):
    monkeypatch.delenv(secrets.VARIABLE, raising=False)
    settings = LaunchConfig(nnodes="1:2", rdzv_endpoint="127.0.0.1:0")
    says = r"need a secret.*python -m parallel2d.launch secret.*launch.insecure=true"
    with pytest.raises(ConfigError, match=says):
        rendezvous.find_rendezvous(settings)
    assert secrets.find_secret(None, insecure=True) == secrets.PUBLIC_SECRET
    monkeypatch.setenv(secrets.VARIABLE, SECRET)
    assert secrets.find_secret(None, insecure=True) == SECRET
    monkeypatch.setenv(secrets.VARIABLE, "short")
    with pytest.raises(ConfigError, match="PARALLEL2D_SECRET: a secret has"):
        secrets.find_secret(None)
