"""Valid JSON bodies made wrong in the ways that clients, attackers and broken proxies do: a value of another type, a
number past its limit, a field too many or too few, something deep, something huge, and bytes that are no JSON at all.

Everything comes from one seeded generator, so that a seed is a whole run.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Json = Any
Place = tuple[Any, Any]
"""A container and a key or index in it."""

RAW = "\0raw:"
"""Strings that begin so are written into the JSON as they are, without quotes."""
NUMBERS: tuple[Json, ...] = (
    *(0, -1, 1, 2, 20, 21, 128, 129, 511, 512, 513, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30),
    *(-(2**31) - 1, -(2**63) - 1, 0.5, -0.0, 1e-300, 1e300, 1.0, 1e2),
    *(f"{RAW}{text}" for text in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "-0", "1E2")),
)
STRINGS: tuple[Json, ...] = (
    *("", " ", "a", "null", "true", "5", "\x00", "\ud800", "é", "\U0001f600", "<eos>", "<turn>", "<bos>", "${x}"),
    *("a" * 1025, "../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/", "{{ 7 * 7 }}"),
    *("{% for i in range(10**9) %}x{% endfor %}", "(a+)+$", "[", "(?P<", "data:image/png;base64,AAAA", "a" * 20000),
)
WHOLES: tuple[Json, ...] = (None, True, False, [], {}, [[]], [{}], [None], {"": None}, [1, "a", None], [0.5], [[[5]]])
NAMES = (
    *("n", "best_of", "stream", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "stop", "seed", "max_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "tools", "tool_choice", "response_format", "suffix"),
    *("structured_outputs", "guided_json", "guided_regex", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("prompt", "prompt_embeds", "messages", "input", "documents", "chat_template_kwargs", "stream_options", "user"),
    *("continue_final_message", "add_generation_prompt", "truncate_prompt_tokens", "min_tokens", "priority", "model"),
    *("__proto__", "constructor", "$ref", "a" * 300, "", "\ud800", "é"),
)


_INTRUDERS = (b"\x00", b"\xff", b"\xed\xa0\x80", b"//", b",", b"}", b'"', b"\\u12")


class BodyMutator:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._changes: list[Callable[[Json], Json]] = [
            *[self._replace_value] * 6,
            *[self._put_field] * 4,
            self._drop,
            self._repeat,
            self._nest,
            self._retype,
            self._lengthen,
        ]

    def mutate(self, body: dict[str, Json]) -> bytes:
        """One to four changes to a copy of `body`, as bytes; one in six is damaged as bytes too."""
        rng = self._rng
        changed: Json = copy.deepcopy(body)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            changed = rng.choice(self._changes)(changed)
        data = encode(changed)
        return self._damage(data) if rng.random() < 1 / 6 else data

    # --- values -----------------------------------------------------------------------------------------------------

    def _value(self) -> Json:
        return copy.deepcopy(self._rng.choice(self._rng.choice([NUMBERS, STRINGS, WHOLES])))

    def _place(self, body: Json) -> Place | None:
        """Somewhere in it, at any depth."""
        places: list[Place] = []
        waiting = [body]
        while waiting:
            container = waiting.pop()
            keys = list(container) if isinstance(container, dict) else range(len(container))
            places += [(container, key) for key in keys]
            waiting += [container[key] for key in keys if isinstance(container[key], dict | list)]
            if len(places) > 2000:
                break
        return self._rng.choice(places) if places else None

    def _at_place(self, body: Json, change: Callable[[Json], Json]) -> Json:
        if not isinstance(body, dict | list) or (place := self._place(body)) is None:
            return change(body)
        container, key = place
        container[key] = change(container[key])
        return body

    def _replace_value(self, body: Json) -> Json:
        return self._at_place(body, lambda _: self._value())

    def _put_field(self, body: Json) -> Json:
        if isinstance(body, dict):
            body[self._rng.choice(NAMES)] = self._value()
        return body

    def _drop(self, body: Json) -> Json:
        if isinstance(body, dict | list) and (place := self._place(body)) is not None:
            container, key = place
            del container[key]
        return body

    def _repeat(self, body: Json) -> Json:
        count = self._rng.choice([2, 5, 130, 1025])
        return self._at_place(body, lambda value: _copies(value, count) if len(str(value)) < 200 else value)

    def _nest(self, body: Json) -> Json:
        def deep(value: Json) -> Json:
            for _ in range(self._rng.choice([1, 5, 60, 200])):
                value = [value] if self._rng.random() < 0.5 else {self._rng.choice(["a", "items", "anyOf"]): value}
            return value

        return self._at_place(body, deep)

    def _retype(self, body: Json) -> Json:
        """The same in another type: "5" for 5, 5 for "5", a list for its only element."""

        def other(value: Json) -> Json:
            if isinstance(value, list):
                return value[0] if value else str(value)
            if isinstance(value, dict):
                return list(value.items())
            return str(value) if not isinstance(value, str) else [value]

        return self._at_place(body, other)

    def _lengthen(self, body: Json) -> Json:
        def long(value: Json) -> Json:
            if isinstance(value, str):
                return value * self._rng.choice([2, 100])
            if isinstance(value, list) and len(value) < 500:
                return [each for copied in _copies(value, self._rng.choice([2, 50])) for each in copied]
            return value

        return self._at_place(body, long)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _damage(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        return rng.choice(
            [
                data[:at],
                data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
                data[:at] + rng.choice(_INTRUDERS) + data[at:],
                b"[" * rng.choice([10, 5000]) + data,
                b"\xef\xbb\xbf" + data,
                data + data,
                data.decode("utf-8", "replace").encode("utf-16"),
                b"",
            ]
        )


def _copies(value: Json, count: int) -> list[Json]:
    """Not the same object again and again: what is changed in one must not change in all."""
    return [copy.deepcopy(value) for _ in range(count)]


def encode(body: Json) -> bytes:
    """As JSON, with lone surrogates as they are escaped and `RAW` strings as they stand."""
    text = json.dumps(body)
    pieces = text.split(json.dumps(RAW)[:-1])
    whole = pieces[0]
    for piece in pieces[1:]:
        raw, _, rest = piece.partition('"')
        whole += raw + rest
    return whole.encode()
