"""`intarsia healthcheck`: it finds the server by its command line, and says what the probes say."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from server import healthcheck_command
from server.cli import main
from server.healthcheck_command import NoServer, url_of

INTARSIA = ["/opt/intarsia/bin/python", "/opt/intarsia/bin/intarsia", "serve"]


class _Probes(BaseHTTPRequestHandler):
    """Ready is what the URL's first part says; alive always."""

    def do_GET(self) -> None:
        ready = not self.path.startswith("/draining")
        status = 200 if ready or self.path.endswith("/livez") else 503
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"status":"ok"}' if status == 200 else b'{"status":"draining"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def probes() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Probes) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "0.0.0.0", "--port", "9000"], "http://127.0.0.1:9000"),
        (["--host=0.0.0.0", "--port=8123", "/models/mine", "--port", "8124"], "http://127.0.0.1:8124"),
        (["--host", "10.1.2.3"], "http://10.1.2.3:8000"),
        (["--host", "0.0.0.0", "--port", "0", "--probe-port", "8001"], "http://127.0.0.1:8001"),
        (["--host", "::", "/models/serve"], "http://[::1]:8000"),
    ],
)
def test_the_flags_of_the_server_say_where_it_listens(flags: list[str], url: str) -> None:
    assert url_of([*INTARSIA, *flags]) == url
    assert url_of(["/sbin/docker-init", "--", "intarsia", "serve", *flags]) == url
    assert url_of(["python", "-m", "server.cli", "serve", *flags]) == url


@pytest.mark.parametrize(
    "command", [[], ["/sbin/init"], ["intarsia"], ["serve", "intarsia"], ["intarsia", "verify"], ["sh", "serve"]]
)
def test_another_first_process_is_no_server(command: list[str]) -> None:
    with pytest.raises(NoServer, match="--url"):
        url_of(command)


def test_a_port_of_the_systems_choice_is_not_known() -> None:
    with pytest.raises(NoServer, match="--port 0"):
        url_of([*INTARSIA, "--port", "0"])


def test_https(tmp_path: Path) -> None:
    """The certificate is for the name that clients use, of an authority that nobody here knows."""
    chain, key, root = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "root.pem"
    authority = trustme.CA()
    issued = authority.issue_cert("llm.example.org")
    chain.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(root))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, key)
    with HTTPServer(("127.0.0.1", 0), _Probes) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        flags = ["--port", str(server.server_port), "--ssl-certfile", str(chain), "--ssl-keyfile", str(key)]
        url = url_of([*INTARSIA, *flags])
        assert url == f"https://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["healthcheck", "--url", url]) == 0
        thread.join()
    with pytest.raises(NoServer, match="give the server a --probe-port"):
        url_of([*INTARSIA, *flags, "--ssl-ca-certs", str(root)])


def test_the_first_process_is_asked(probes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = probes.rpartition(":")[2]
    cmdline = tmp_path / "cmdline"
    cmdline.write_bytes(
        b"".join(each.encode() + b"\0" for each in [*INTARSIA, "--port", port, "--served-model-name", "é"])
    )
    monkeypatch.setattr(healthcheck_command, "_FIRST_PROCESS", cmdline)
    assert main(["healthcheck"]) == 0
    cmdline.unlink()
    assert main(["healthcheck"]) == 1


def test_readiness_and_liveness_differ(probes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["healthcheck", "--url", f"{probes}/draining"]) == 1
    assert "503" in (said := capsys.readouterr().out)
    assert "draining" in said
    assert main(["healthcheck", "--url", f"{probes}/draining", "--probe", "live"]) == 0
    assert main(["healthcheck", "--url", f"{probes}/"]) == 0


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert main(["healthcheck", "--url", url]) == 1
    assert f"{url} does not answer" in capsys.readouterr().out


def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["healthcheck", "--timeout", "0.1", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}"]) == 1


def test_what_does_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["healthcheck", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:0", "http://[::1"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["healthcheck", "--url", url])
    assert exit_.value.code == 2


def test_it_imports_nothing_that_takes_long() -> None:
    """Docker runs it every few seconds, on the server's own cores."""
    script = (
        "import sys; from server.cli import main; status = main(['healthcheck', '--url', 'http://127.0.0.1:1']);"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'pydantic', 'httpx', 'uvicorn'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 10 + status)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 11
