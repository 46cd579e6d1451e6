"""HTTPS: the certificate that the server shows, and which clients' certificates it wants to see.

Each API process has one `Certificate` and asks it for a context for each connection. Certificates are renewed every few
weeks, and a server that streams should not be restarted for that: the files are read again when they have changed. A
renewal that is not complete yet, a new certificate beside the old key, changes nothing until it is.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("intarsia")

HANDSHAKE_SECONDS = 15.0
"""A client that does not finish its handshake in time is cut."""
SHUTDOWN_SECONDS = 5.0
"""For its goodbye."""


class UnusableCertificate(Exception):
    """The message is for the operator."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files, by path. `key`: empty where the key is in the certificate's file."""

    certificate: str
    key: str = ""
    password_file: str = ""
    """Holds the key's password."""
    client_authorities: str = ""
    """Not empty: only clients with a certificate of these are let in."""

    def load(self) -> ssl.SSLContext:
        """Raises UnusableCertificate. Takes a millisecond."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        name = self.certificate
        try:
            # Never None: OpenSSL would ask the terminal.
            context.load_cert_chain(self.certificate, self.key or None, self._password)
            if self.client_authorities:
                name = self.client_authorities
                context.load_verify_locations(name)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UnusableCertificate(f"cannot use the certificate {name}: {_reason(error)}") from error
        return context

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """Changes with the files."""
        return tuple(map(_file_state, filter(None, (self.certificate, self.key, self.client_authorities))))

    def _password(self) -> bytes:
        if not self.password_file:
            raise ValueError("its key has a password, so --ssl-keyfile-password-file is needed")
        return Path(self.password_file).read_bytes().rstrip(b"\r\n")


class Certificate:
    """`files`, loaded. Raises UnusableCertificate."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._state = files.state()
        self._context = files.load()

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        state = self._files.state()
        if state != self._state:
            self._state = state
            try:
                self._context = self._files.load()
                logger.info("the certificate has been read again")
            except UnusableCertificate as error:
                logger.error("%s; the old one stays in use", error)
        return self._context


def _file_state(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is not in PEM format").replace("_", " ").lower()
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
