"""Connections that cost and bring nothing: idle ones by the thousand, peers that have vanished, clients that do not
read. What they hold is bounded, it ends, and others keep pace."""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.faulty_server import FaultyServer, Footprint, request_bytes
from tests.server.harness import Stream, eventually

_TCP_REPAIR = 19
_PASSING = 8
"""File descriptors that come and go."""
LONG = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 450, "ignore_eos": True}


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: FaultyServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30)


@pytest.mark.usefixtures("many_files")
def test_idle_connections(faulty: FaultyServer, long_run: bool) -> None:
    """A third has said nothing, one has said half of something, one has had an answer."""
    count = 2000 if long_run else 300
    faulty.assert_settled()
    before = faulty.footprints(objects=False)["server"]
    with ExitStack() as stack:
        for index in range(count):
            connection = stack.enter_context(connect(faulty))
            if index % 3:
                data = request_bytes("/livez", b"", method="GET")
                connection.sendall(data[:20] if index % 3 == 1 else data)
        # A few may have been those of whoever asked before, and be closed by now.
        held = eventually(lambda: _held(faulty, before.files + count - _PASSING))
        assert held is not None
        assert held.anonymous - before.anonymous < count * 64 << 10
        faulty.assert_well()
    eventually(lambda: faulty.footprints(objects=False)["server"].files <= before.files + _PASSING)
    faulty.assert_well()


def _held(server: FaultyServer, files: int) -> Footprint | None:
    footprint = server.footprints(objects=False)["server"]
    return footprint if footprint.files >= files else None


def vanish(connection: socket.socket) -> None:
    """Close without a word to the other side, as a machine does that loses its power."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    except PermissionError:
        pytest.skip("only root can make a connection vanish")
    connection.close()


def test_peers_that_have_vanished(faulty: FaultyServer) -> None:
    """Nothing is sent to them, so nothing is lost: only asking them tells."""
    connections = [connect(faulty) for _ in range(6)]
    with ExitStack() as stack:
        for connection in connections:
            stack.enter_context(connection)
        faulty.signal_runner(signal.SIGSTOP)
        stack.callback(faulty.signal_runner, signal.SIGCONT)
        for number, connection in enumerate(connections):
            path, body = "/v1/completions", {**LONG, "stream": number % 2 == 0}
            data = request_bytes(path, body)
            connection.sendall(data if number < 4 else data[:-20])
        eventually(lambda: faulty.levels()["server_load"] == 6)
        for connection in connections:
            vanish(connection)
        eventually(lambda: faulty.levels()["server_load"] == 0)
    eventually(lambda: faulty.status("/readyz") == 200)
    faulty.assert_well()


def test_who_closes_only_his_own_side(faulty: FaultyServer) -> None:
    """A client that says that it has no more to send has gone: nobody waits for an answer on half a connection."""
    with connect(faulty) as connection:
        connection.sendall(request_bytes("/v1/completions", LONG))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    faulty.assert_well()


def test_clients_that_never_read(faulty: FaultyServer) -> None:
    """Log-probabilities make events of two kilobytes: more than the buffers of a connection take."""
    body = {**LONG, "max_tokens": 300, "logprobs": 20, "n": 2, "stream": True}
    faulty.assert_settled()
    before = faulty.footprints(objects=False)["server"]
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", faulty.port))
            connection.sendall(request_bytes("/v1/completions", body))
        # Who reads gets everything, though the others' slots run full buffers.
        stream = Stream(faulty.port, "/v1/completions", {**LONG, "max_tokens": 50, "stream": True})
        assert stream.rest()[-1] == "[DONE]"
        deadline = time.monotonic() + 60
        while faulty.levels()["server_load"]:  # Until they are cut: they never leave by themselves.
            held = faulty.footprints(objects=False)["server"].anonymous - before.anonymous
            assert held < 32 << 20
            assert time.monotonic() < deadline
            time.sleep(0.2)
    faulty.assert_well()
