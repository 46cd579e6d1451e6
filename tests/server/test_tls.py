"""HTTPS with certificates of an authority of our own, by a client that checks them."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from server.cli import main
from server.healthcheck_command import url_of
from server.tls import Certificate, CertificateFiles, UnusableCertificate
from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, eventually, free_port

BODY = {"model": "scripted", "prompt": [5, 6], "max_tokens": 20, "ignore_eos": True}


class Authority:
    """Certificates in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = trustme.CA()
        self.trust = folder / "root.pem"
        self.root.cert_pem.write_to_path(str(self.trust))

    def issue(self, name: str = "server") -> tuple[str, str]:
        """Paths of chain and key."""
        issued = self.root.issue_cert("127.0.0.1", "localhost")
        chain, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        for path, parts in ((chain, issued.cert_chain_pems), (key, [issued.private_key_pem])):
            path.write_bytes(b"".join(part.bytes() for part in parts))
        return str(chain), str(key)

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.trust))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def wait_ready(server: ServerProcess, client: httpx.Client) -> None:
    def ready() -> bool:
        try:
            return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            assert server.process.poll() is None, server.stderr
            return False

    eventually(ready)


@pytest.fixture
def secure_client(request: pytest.FixtureRequest, authority: Authority) -> Iterator[httpx.Client]:
    with httpx.Client(verify=authority.context(), timeout=60) as client:
        yield client


def shown_serial(port: int, context: ssl.SSLContext) -> str:
    """Of the certificate that a new connection is shown."""
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_a_server_speaks_https(start_server: StartServer, authority: Authority, secure_client: httpx.Client) -> None:
    chain, key = authority.issue()
    server = start_server(ssl_certfile=chain, ssl_keyfile=key, api_workers=2)
    secure_client.base_url = f"https://localhost:{server.port}"
    wait_ready(server, secure_client)
    assert server.process.stdout is not None
    assert f"curl https://127.0.0.1:{server.port}/" in server.process.stdout.readline().decode()
    for _ in range(4):  # Each of the workers gets two.
        with httpx.Client(verify=authority.context(), base_url=secure_client.base_url, timeout=60) as client:
            assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 20
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"
    assert {event["worker"] for event in server.messages("generate")} == {0, 1}
    # Who does not trust the authority or speaks plain HTTP gets nothing, and the server goes on.
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"https://localhost:{server.port}/livez", timeout=60)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://localhost:{server.port}/livez", timeout=60)
    # A renewed certificate is shown to who comes next, and half of one is not.
    before = shown_serial(server.port, authority.context())
    new_chain, new_key = authority.issue("new")
    os.replace(new_chain, chain)
    assert shown_serial(server.port, authority.context()) == before
    eventually(lambda: "the old one stays in use" in server.stderr)
    os.replace(new_key, key)
    assert shown_serial(server.port, authority.context()) != before
    assert secure_client.get("/livez").status_code == 200
    assert "Traceback" not in server.stderr


def test_clients_may_have_to_show_one_too(
    start_server: StartServer, authority: Authority, secure_client: httpx.Client, tmp_path: Path
) -> None:
    chain, key = authority.issue()
    files: dict[str, Any] = {"ssl_certfile": chain, "ssl_keyfile": key, "ssl_ca_certs": str(authority.trust)}
    server = start_server(**files, probe_port=(probe_port := free_port()), api_workers=2)
    known, foreign = authority.context(), authority.context()
    known.load_cert_chain(*authority.issue("client"))
    (tmp_path / "foreign").mkdir()
    foreign.load_cert_chain(*Authority(tmp_path / "foreign").issue("client"))
    base = f"https://localhost:{server.port}"
    with httpx.Client(verify=known, base_url=base, timeout=60) as client:
        wait_ready(server, client)
    secure_client.base_url = base
    with httpx.Client(verify=foreign, base_url=base, timeout=60) as stranger:
        for client in (secure_client, stranger):
            with pytest.raises(httpx.TransportError):
                client.get("/livez")
    # A kubelet has none to show, nor has a health check in the container.
    flags = [each for name, value in files.items() for each in (f"--{name.replace('_', '-')}", value)]
    url = url_of(["intarsia", "serve", "--port", str(server.port), "--probe-port", str(probe_port), *flags])
    assert url == f"http://127.0.0.1:{probe_port}"
    assert main(["healthcheck", "--url", url]) == 0
    with httpx.Client(base_url=url, timeout=60) as probe:
        for path in ("/livez", "/readyz", "/health", "/ping"):
            assert probe.get(path).status_code == probe.head(path).status_code == 200
        for path in ("/", "/metrics", "/v1/models", "/load", "/openapi.json", "/docs"):
            assert probe.get(path).json()["error"]["code"] == "not_found"
        assert probe.post("/v1/completions", json=BODY).status_code == 404
        server.signal_runner(signal.SIGKILL)
        eventually(lambda: server.process.poll() is not None)
        with pytest.raises(httpx.TransportError):
            probe.get("/livez")
    assert "Traceback" not in server.stderr


def test_a_certificate_that_cannot_be_used_ends_the_start(start_server: StartServer, authority: Authority) -> None:
    chain, _ = authority.issue()
    _, other_key = authority.issue("other")
    server = start_server(ssl_certfile=chain, ssl_keyfile=other_key)
    assert server.exit_status() == 3
    assert "intarsia: cannot use the certificate" in server.stderr
    assert "Traceback" not in server.stderr
    assert server.messages("start") == []  # No runner was started for nothing.


def test_what_is_wrong_is_said(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue()
    _, other = authority.issue("other")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no certificate")
    locked = tmp_path / "locked.key"
    password = tmp_path / "password"
    password.write_bytes(b"secret\n")
    private = load_pem_private_key(Path(key).read_bytes(), None)
    encrypted = private.private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"secret")
    )
    locked.write_bytes(encrypted)
    for files, words in (
        (CertificateFiles(str(tmp_path / "missing"), key), "No such file"),
        (CertificateFiles(str(garbage), key), "garbage"),
        (CertificateFiles(chain, other), "key values mismatch"),
        (CertificateFiles(chain, str(locked)), "--ssl-keyfile-password-file is needed"),
        (CertificateFiles(chain, str(locked), str(garbage)), "cannot use"),
        (CertificateFiles(chain, key, "", str(garbage)), "garbage"),
    ):
        with pytest.raises(UnusableCertificate, match=words):
            Certificate(files)
    Certificate(CertificateFiles(chain, str(locked), str(password)))


def test_key_and_certificate_may_be_in_one_file(authority: Authority) -> None:
    chain, key = authority.issue()
    Path(chain).write_bytes(Path(key).read_bytes() + Path(chain).read_bytes())
    assert Certificate(CertificateFiles(chain)).context().minimum_version == ssl.TLSVersion.TLSv1_2
