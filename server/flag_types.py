"""What the command lines' flags are made of: checked numbers, sizes and texts. Used by the subcommands' modules.

Each is a `type=` for argparse: it raises `ArgumentTypeError` with the limit that was broken.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from server.api_keys import parse_key, parse_keys


def with_default(text: str, default: object) -> str:
    return f"{text} (default: {default})".replace("%", "%%")


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            invalid(f"{text!r} is not a whole number")
        if value < low and high == sys.maxsize:
            invalid(f"{value} is below {low}")
        if not low <= value <= high:
            invalid(f"{value} is not between {low} and {high}")
        return value

    return parse


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def size(low: int) -> Callable[[str], int]:
    """A whole number, with K, M, G (powers of 1000) or Ki, Mi, Gi (of 1024) behind it."""
    check = integer(low, sys.maxsize)

    def parse(text: str) -> int:
        number = text.rstrip("kKmMgGiI")
        unit = text[len(number) :].lower()
        if not number.isdecimal() or unit not in _UNITS:
            invalid(f"{text!r} is not a size: write 500000000, 500M or 4Gi")
        return check(str(int(number) * _UNITS[unit]))

    return parse


def seconds(text: str) -> float:
    return number(text, 0.0, 86400.0)


def timeout(text: str) -> float:
    value = seconds(text)
    return value if value > 0 else invalid("0 seconds are not enough for anything")


def fraction(text: str) -> float:
    value = number(text, 0.0, 1.0)
    return value if value > 0 else invalid("0 is not above 0")


def number(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        invalid(f"{text!r} is not a number")
    if not low <= value <= high:
        invalid(f"{text} is not between {low:g} and {high:g}")
    return value


def real(low: float, high: float) -> Callable[[str], float]:
    return lambda text: number(text, low, high)


def nonempty(text: str) -> str:
    return text.strip() or invalid("must not be empty")


def http_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        invalid(f"{text!r} is not a URL that begins with http:// or https://")
    return text


def api_key(text: str) -> str:
    """A key, and the settings behind it (`api_keys`)."""
    text = nonempty(text)
    try:
        parse_key(text)
    except ValueError as error:
        invalid(str(error))
    return text


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def named_path(text: str) -> tuple[str, str]:
    """NAME=PATH, where something is at the path."""
    name, equals, path = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        invalid(f"{text!r} is not NAME=PATH with a name of 1 to 64 letters, digits, dots, dashes and underscores")
    return (name, path) if Path(path).exists() else invalid(f"there is no file or folder {path!r}")


def key_file(name: str) -> list[str]:
    """The keys with their settings, without empty lines and lines that begin with #."""
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        invalid(f"cannot read {name}: {error.strerror}")
    except UnicodeDecodeError:
        invalid(f"{name} is not a text in UTF-8")
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    try:
        parse_keys(keys)
    except ValueError as error:
        invalid(f"{name}: {error}")
    return keys or invalid(f"there is no key in {name}")


def readable(name: str) -> str:
    """A file that can be read."""
    try:
        with open(name, "rb"):
            return name
    except OSError as error:
        invalid(f"cannot read {name}: {error.strerror}")


def chat_template(text: str) -> str:
    """A file that can be read, or a template: only that has braces. Known before the model is loaded."""
    return text if "{" in text else readable(text)


def origin(text: str) -> str:
    """Of web pages, as browsers write it: in lower case, without a path and without the scheme's own port."""
    url = urlsplit(text)
    try:
        port = url.port
    except ValueError:
        invalid(f"{text!r} has no such port")
    if url.scheme not in ("http", "https") or not url.hostname or text != f"{url.scheme}://{url.netloc}".lower():
        invalid(f"{text!r} is not an origin: write https://example.org or http://localhost:3000")
    if "@" in url.netloc or port == {"http": 80, "https": 443}[url.scheme]:
        invalid(f"{text!r} is not what a browser sends: no user, and no port where it is the usual one")
    return text


def invalid(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)
