"""Large answers to clients that read slowly, from a real server."""

from __future__ import annotations

import json
import socket

import httpx

from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, eventually

SIZE = 7 << 20
"""More than the kernel holds of one connection."""


def large_response(server: ServerProcess) -> str:
    """Its id. What is said of a schema is told in the response, and not to the model."""
    schema = {"type": "json_schema", "name": "s", "schema": {}, "description": "x" * SIZE}
    body = {"input": "hello", "max_output_tokens": 1, "text": {"format": schema}}
    answer = httpx.post(server.base + "/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text[:1000]
    return str(answer.json()["id"])


def test_an_answer_is_not_over_before_it_is_read(start_server: StartServer) -> None:
    """Else nothing would count what is held for clients that don't read."""
    server = start_server(max_body_bytes=2 * SIZE, max_json_bytes=2 * SIZE).wait_ready()
    response = large_response(server)

    def load() -> int:
        return int(httpx.get(server.base + "/load", timeout=60).json()["server_load"])

    eventually(lambda: load() == 0)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(30)
        head = f"GET /v1/responses/{response} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        data = connection.recv(1 << 16)
        assert load() == 1
        while part := connection.recv(1 << 20):
            data += part
    eventually(lambda: load() == 0)
    _, _, body = data.partition(b"\r\n\r\n")
    assert json.loads(body)["text"]["format"]["description"] == "x" * SIZE
