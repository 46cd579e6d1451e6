"""Images that a request names by an http(s) URL, fetched for the client: only from hosts that the operator has allowed,
and never from an address inside.

The host is resolved here, once; every address that it has must be a public one, and the connection goes to the address
that was checked, so that a name which resolves differently a moment later gains nothing. Redirects are not followed,
proxies and cookies of the environment are not used, and a body is read under a limit of size and time, as it comes,
never decompressed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, urlsplit

import httpx

from server.image_file import ImageError
from server.long_strings import LongString

FETCH_SECONDS = 10.0
_MAX_URL_CHARS = 4096
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether it is an address of the internet: not loopback, link-local, private, unique-local, multicast, reserved,
    nor a way to write one of these in IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        inner = [address.sixtofour, *(address.teredo or ())]
        if address.is_site_local or any(each is not None and not is_public(each) for each in inner):
            return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_loopback or address.is_unspecified
    )


class ImageFetcher:
    """`allowed`: hosts, lower case, each with its port where that isn't the scheme's own. Empty: none."""

    def __init__(
        self,
        allowed: Sequence[str],
        *,
        max_bytes: int,
        seconds: float = FETCH_SECONDS,
        is_allowed_address: Callable[[Address], bool] = is_public,
    ) -> None:
        self._allowed = frozenset(host.lower().rstrip(".") for host in allowed)
        self._max_bytes, self._seconds = max_bytes, seconds
        self._is_allowed_address = is_allowed_address

    async def fetch(self, url: str) -> bytes:
        """The body of a GET. Raises ImageError."""
        parts, host, port = self._checked(url)
        try:
            async with asyncio.timeout(self._seconds):
                address = await self._resolve(host, port)
                return await self._get(parts, host, port, address)
        except TimeoutError:
            raise ImageError(f"the image's host took longer than {self._seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
            raise ImageError("the image could not be fetched from its host") from None

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        if len(url) > _MAX_URL_CHARS or isinstance(url, LongString):
            raise ImageError(f"the URL has more than {_MAX_URL_CHARS} characters")
        if not self._allowed:
            raise ImageError("this server fetches no images: send a data: URL")
        try:
            parts = urlsplit(url)
            scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".")
            port = parts.port or _PORTS[scheme]
        except (ValueError, KeyError):
            raise ImageError("the URL must be a data:, http: or https: URL") from None
        if parts.username is not None or parts.password is not None:
            raise ImageError("the URL must not have a user name in it")
        named = host if port == _PORTS[scheme] else f"{host}:{port}"
        if not host or not url.isascii() or named not in self._allowed:
            raise ImageError("the URL's host is not one that this server fetches images from")
        return parts, host, port

    async def _resolve(self, host: str, port: int) -> Address:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if not addresses or not all(map(self._is_allowed_address, addresses)):
            raise ImageError("the URL's host is not one that this server fetches images from")
        return addresses[0]

    async def _get(self, parts: SplitResult, host: str, port: int, address: Address) -> bytes:
        literal = f"[{address}]" if address.version == 6 else str(address)
        pinned = parts._replace(netloc=f"{literal}:{port}", fragment="").geturl()
        headers = {"Host": parts.netloc, "Accept": "image/*", "Accept-Encoding": "identity"}
        # trust_env: no proxy, no .netrc. The certificate is checked against the host's name, not the address.
        async with (
            httpx.AsyncClient(
                trust_env=False, follow_redirects=False, headers=headers, timeout=self._seconds
            ) as client,
            client.stream("GET", pinned, extensions={"sni_hostname": host}) as response,
        ):
            if response.status_code != 200:
                raise ImageError(f"the image's host answered {response.status_code} (redirects are not followed)")
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self._max_bytes:
                    raise ImageError(f"the image has more than {self._max_bytes} bytes")
            return bytes(body)
