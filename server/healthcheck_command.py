"""`intarsia healthcheck`: exit status 0 if the server is ready. For `HEALTHCHECK` in an image, which has no curl.

It needs no flags there: a container's first process is the server, or an init that was given the server's command
line, so its arguments are read with the server's own parser, and what they don't say is the server's own default.
Nothing but the standard library and the flags is imported: Docker runs it every few seconds.
"""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from server.config import ServerConfig
from server.flag_types import invalid, number

HEALTHY, UNHEALTHY = 0, 1
PROBES = {"ready": "/readyz", "live": "/livez"}
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
_FIRST_PROCESS = Path("/proc/1/cmdline")


class NoServer(Exception):
    """The first process is no server whose address could be read. The message says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        type=_url,
        help="base address of the server (default: where the container's first process listens)",
    )
    add(
        "--probe",
        choices=tuple(PROBES),
        default="ready",
        help="ready: it takes requests; live: only a restart would help otherwise (default: ready)",
    )
    add(
        "--timeout",
        type=lambda text: number(text, 0.1, 3600.0),
        default=4.0,
        metavar="SECONDS",
        help="how long to wait for an answer (default: 4)",
    )


def run(arguments: argparse.Namespace) -> int:
    """0: healthy; 1: not, with the reason on standard output, where `docker inspect` shows it."""
    try:
        url = arguments.url or url_of(_first_process())
    except NoServer as error:
        print(error)
        return UNHEALTHY
    try:
        return _ask(url, PROBES[arguments.probe], arguments.timeout)
    except (OSError, http.client.HTTPException) as error:
        print(f"{url} does not answer: {str(error) or type(error).__name__}")
        return UNHEALTHY


def url_of(command: Sequence[str]) -> str:
    """Where the server that `command` starts listens. `command` may begin with an init and its flags.

    Raises `NoServer` if there is no `intarsia serve` in it, or nothing that can be asked.
    """
    config = _config(_server_flags(command))
    scheme, port = ("https" if config.ssl_certfile else "http"), config.port
    if config.probe_port is not None:
        scheme, port = "http", config.probe_port
    elif port == 0:
        raise NoServer("--port 0 is a port that nobody knows: tell the health check a --url")
    elif config.ssl_ca_certs:
        raise NoServer("--ssl-ca-certs lets nobody in without a certificate: give the server a --probe-port")
    host = _ANY_ADDRESS.get(config.host, config.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _server_flags(command: Sequence[str]) -> Sequence[str]:
    for index in range(1, len(command)):
        program = os.path.basename(command[index - 1])
        if command[index] == "serve" and program in ("intarsia", "server.cli", "cli.py"):
            return command[index + 1 :]
    raise NoServer("the first process is not `intarsia serve`: tell the health check a --url")


def _config(flags: Sequence[str]) -> ServerConfig:
    from server import serve_command

    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve_command.add_arguments(parser)
    return serve_command.build_config(parser.parse_args(flags))


def _first_process() -> Sequence[str]:
    try:
        return [os.fsdecode(each) for each in _FIRST_PROCESS.read_bytes().split(b"\0")[:-1]]
    except OSError as error:
        raise NoServer(f"cannot read {_FIRST_PROCESS} ({error.strerror}): tell the health check a --url") from error


def _ask(url: str, path: str, timeout: float) -> int:
    parts = urlsplit(url)
    connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        connect = _https_connection
    connection = connect(parts.hostname, parts.port, timeout=timeout)
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        response = connection.getresponse()
        said = response.read(200).decode(errors="replace")
    finally:
        connection.close()
    print(f"{response.status} {said}")
    return HEALTHY if response.status == 200 else UNHEALTHY


def _https_connection(host: str, port: int | None, timeout: float) -> http.client.HTTPSConnection:
    """Without looking at the certificate: it is for the name that clients use, not for this address, and nothing is
    said here that anybody could want."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    return text if usable else invalid(f"{text!r} is not like http://127.0.0.1:8000")
