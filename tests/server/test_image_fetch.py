"""Images named by URL: from whom they are fetched, and that nothing inside can be reached so."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from server.image_fetch import ImageFetcher, is_public
from server.image_file import ImageError
from server.long_strings import LongString

BODY = b"image" * 100


class _Handler(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Host"]))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/image")
            self.end_headers()
        elif self.path == "/missing":
            self.send_error(404)
        elif self.path == "/slow":
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b"x")
            stop.wait(10)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while not stop.is_set():
                    self.wfile.write(bytes(4096))
            except OSError:
                pass
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *args: Any) -> None:
        pass


stop = threading.Event()


@pytest.fixture
def port() -> Iterator[int]:
    stop.clear()
    _Handler.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        stop.set()
        server.shutdown()
        thread.join()


def fetch(url: str, *allowed: str, inside: bool = False, **options: Any) -> bytes:
    """`inside`: addresses of this machine count as public ones."""
    policy: dict[str, Any] = {"is_allowed_address": lambda address: address.is_loopback} if inside else {}
    fetcher = ImageFetcher(allowed, max_bytes=10_000, **policy, **options)
    return asyncio.run(fetcher.fetch(url))


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Lets every name have these addresses, one set a question; returns the names asked for."""

    def install(*answers: list[str]) -> list[str]:
        asked: list[str] = []

        def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
            asked.append(host)
            addresses = answers[min(len(asked), len(answers)) - 1]
            return [
                (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
                for a in addresses
            ]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return asked

    return install


def test_a_host_that_is_allowed(port: int, resolves: Callable[..., list[str]]) -> None:
    """The connection goes to the address that was looked up, once; the request names the host."""
    asked = resolves(["127.0.0.1"], ["203.0.113.9"])
    url = f"http://Images.example:{port}/image?size=1#top"
    assert fetch(url, f"images.example:{port}", inside=True) == BODY
    assert asked == ["images.example"]
    assert _Handler.seen == [("/image?size=1", f"Images.example:{port}")]


def test_no_address_inside_is_reached(port: int, resolves: Callable[..., list[str]]) -> None:
    resolves(["127.0.0.1"])
    with pytest.raises(ImageError, match="not one that this server fetches"):
        fetch(f"http://images.example:{port}/image", f"images.example:{port}")
    resolves(["93.184.215.14", "10.0.0.1"])
    with pytest.raises(ImageError, match="not one that this server fetches"):
        fetch(f"http://images.example:{port}/image", f"images.example:{port}")
    assert _Handler.seen == []


@pytest.mark.parametrize("path", ["/redirect", "/missing"])
def test_redirects_are_not_followed(path: str, port: int) -> None:
    with pytest.raises(ImageError, match=r"answered (302|404) \(redirects are not followed\)"):
        fetch(f"http://127.0.0.1:{port}{path}", f"127.0.0.1:{port}", inside=True)
    assert [seen for seen, _ in _Handler.seen] == [path]


def test_a_slow_host(port: int) -> None:
    with pytest.raises(ImageError, match=r"took longer than 0\.2 s"):
        fetch(f"http://127.0.0.1:{port}/slow", f"127.0.0.1:{port}", inside=True, seconds=0.2)


def test_an_endless_body(port: int) -> None:
    with pytest.raises(ImageError, match="more than 10000 bytes"):
        fetch(f"http://127.0.0.1:{port}/endless", f"127.0.0.1:{port}", inside=True)


def test_nobody_there() -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ImageError, match="could not be fetched"):
            fetch(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}", inside=True)
    with pytest.raises(ImageError, match="could not be fetched"):
        fetch("http://images.invalid./", "images.invalid", inside=True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other.example/", "not one that"),
        ("http://images.example:8080/", "not one that"),
        ("http://sub.images.example/", "not one that"),
        ("http://images.example.other.example/", "not one that"),
        ("http://images.example@other.example/", "user name"),
        ("http://user:password@images.example/", "user name"),
        ("http://images.example\\@other.example/", "."),
        ("http:///image", "not one that"),
        ("http://[::1/", "must be a data:"),
        ("http://images.example:99999/", "must be a data:"),
        ("http://ımages.example/", "not one that"),
        ("ftp://images.example/", "must be a data:"),
        ("file:///etc/passwd", "must be a data:"),
        ("gopher://images.example/", "must be a data:"),
        ("images.example/image", "must be a data:"),
        ("http://images.example/" + "x" * 5000, "more than 4096 characters"),
    ],
)
def test_urls_that_are_refused(url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("looked up"))
    with pytest.raises(ImageError, match=reason):
        fetch(url, "images.example")


def test_a_long_url_that_is_still_in_the_body() -> None:
    url = LongString.of(memoryview(b"http://images.example/" + b"x" * 90_000))
    with pytest.raises(ImageError, match="more than 4096 characters"):
        fetch(url, "images.example")


def test_without_domains_nothing_is_fetched() -> None:
    with pytest.raises(ImageError, match="fetches no images"):
        fetch("https://images.example/")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1",
        "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "::127.0.0.1",
    ],
)  # fmt: skip
def test_addresses_inside(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


OUTSIDE = ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


@pytest.mark.parametrize("address", OUTSIDE)
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
