"""API keys as the command line and key files give them: the key itself, and behind it settings of its own.

    sk-3f9c2e                                        a key
    sk-77aa10 name=batch concurrency=8 tokens=200000   one with a name and limits

Parsed once from the configuration: `auth` compares the secrets, the log shows the names, the runner holds the limits
(`runner.admission`), by the keys' places in the list. No message here quotes what may be a key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.config import ClientLimits

_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_LIMITS = {"concurrency": "concurrency", "requests": "requests_per_minute", "tokens": "tokens_per_minute"}
_MAX_LIMIT = 1 << 53


@dataclass(frozen=True, slots=True)
class ApiKey:
    secret: str
    name: str
    """For the log: not a secret. "key-1" where none is given, by its place."""
    limits: ClientLimits
    """Its own; None is the server's default."""


def parse_key(text: str, place: int = 0) -> ApiKey:
    """Raises ValueError, whose message is for the operator."""
    secret, *settings = text.split()
    name, limits = f"key-{place + 1}", ClientLimits()
    for setting in settings:
        what, equals, value = setting.partition("=")
        if not equals or what not in ("name", *_LIMITS):
            raise ValueError(f"behind a key there can be only name=, {'=, '.join(_LIMITS)}=")
        if what == "name":
            if not _NAME.fullmatch(value):
                raise ValueError("a key's name has 1 to 64 letters, digits, and characters of _.@-")
            name = value
        else:
            limits = replace(limits, **{_LIMITS[what]: _positive(what, value)})
    return ApiKey(secret, name, limits)


def parse_keys(texts: Sequence[str]) -> tuple[ApiKey, ...]:
    return tuple(parse_key(text, place) for place, text in enumerate(texts))


def limits_of(keys: Sequence[ApiKey], default: ClientLimits) -> tuple[ClientLimits, ...]:
    """Each client's, by its number. Without keys everybody is the same client."""
    if not keys:
        return (default,)
    return tuple(
        ClientLimits(
            concurrency=key.limits.concurrency or default.concurrency,
            requests_per_minute=key.limits.requests_per_minute or default.requests_per_minute,
            tokens_per_minute=key.limits.tokens_per_minute or default.tokens_per_minute,
        )
        for key in keys
    )


def _positive(what: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 0 < int(value[:20]) <= _MAX_LIMIT:
        raise ValueError(f"{what}= takes a whole number of at least 1")
    return int(value)
