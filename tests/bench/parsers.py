"""`python -m tests.bench.parsers`: the tool and reasoning parsers on 500 KB of text that is as bad as we could make it,
in one piece, and what they cost for each token of an ordinary answer.

Prints one JSON line a figure, CPU time. The event loop waits for a parser, so no text may hold it up for long: 50 ms is
the target for each of these, and no answer comes in pieces of that size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from server.reasoning.styles import REASONING_STYLES
from server.tools.styles import TOOL_STYLES

SIZE = 500_000
TOOLS: dict[str, dict[str, Any]] = {"f": {"properties": {"n": {"type": "integer"}}}, "g": {}}

_HEAD = '<tool_call>{"name": "f", "arguments": {"a": '
# style: (what the text begins with, what then repeats)
ADVERSARIAL: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        ("", "<"), ("", "<tool_call>"), ("", "<tool_call>x"), ("", "<tool_call>{"), ("", "<tool_call></tool_call>"),
        ("", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'), ("<tool_call>", " "), ("<tool_call>", "["),
        ("<tool_call>", '{"'), ('<tool_call>{"x": [', '{"a": 1},'), (_HEAD, "[]"), (_HEAD, "[[[[[[[]]]]]]]"),
        (_HEAD, "[{" * 5 + "}]" * 5), (_HEAD, "{["), (_HEAD, '""'), (_HEAD, "[}"), (_HEAD + '"', "\\"),
        (_HEAD + '"', '\\"'),
        (_HEAD + "x<", "</tool_cal"),
    ],
    "llama3_json": [
        ("", "{"), ("", " "), ("{", " "), ('{"', "\\"), ("", "<|python_tag|>"), ("", "<|python_tag|"),
        ("", '{"name": "f", "parameters": {}};'), ('{"name": "f", "x": [', '{"a": 1},'),
    ],
    "mistral": [
        ("", "["), ("", "[TOOL_CALLS]"), ("", "[TOOL_CALLS]f"), ("", "[TOOL_CALLS]f[ARGS]{}"), ("[TOOL_CALLS]", "["),
        ("[TOOL_CALLS]", "[A"), ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]f", " "),
    ],
    "pythonic": [
        ("[f(", "a0=1, "), ("[f(", "a0=1,"), ("", "["), ("", "[f("), ("", "[f(a="), ("[f(a=", "["), ("[f(a=[", "[],"),
        ("[f(a=[", "1, "), ("[f(a=[", "True,"), ("[f(a=[", "'',"), ("[f(a=[", "(),"), ("[f(a=[", "[[[[[]]]]],"),
        ("[f(", "a=True,"), ("[f(", "a='b',"), ("[f(", " "), ("[f(a=", " "), ("[f(", "a"), ("[", "f(),"),
        ("[f(a='", "\\'"), ("[f(a='", "\\"), ("[f(a='", '"'), ("[f(a='", "\\x41"), ("[f(a={", '":'),
        ("", "<|tool_call_start|>["),
    ],
    "qwen3_coder": [
        ("", "<tool_call>"), ("", "<function="), ("", "<tool_call><function=f></function></tool_call>"),
        ("<tool_call>", " "), ("", "<function=f>"), ("<function=f>", "<parameter=a></parameter>"),
        ("<function=f>", "<parameter=n>1</parameter>"), ("<function=f><parameter=a>", "</parameter"),
        ("<function=f><parameter=a>", "\n"), ("<function=f><parameter=a>", '"'), ("<function=f><parameter=n>", "["),
        ("<function=f>", "<parameter="),
    ],
}  # fmt: skip
THOUGHTS = [("<think>", "<"), ("<think>", "</think"), ("<think>", " "), ("", "<think>"), ("<think>", "a "), ("", " ")]


class Parser(Protocol):
    """Either kind."""

    def push(self, text: str) -> object: ...

    def flush(self) -> object: ...


def tool_parser(name: str) -> Parser:
    return TOOL_STYLES[name].parser(TOOLS, frozenset())


def think_parser(name: str) -> Parser:
    return REASONING_STYLES["qwen3"].parser(is_open=name == "open")


def cases() -> Iterator[tuple[str, Callable[[], Parser], str]]:
    """(the parser's name, a new parser, the text)"""
    for name, texts in ADVERSARIAL.items():
        for beginning, repeated in texts:
            yield name, partial(tool_parser, name), _text(beginning, repeated)
    for beginning, repeated in THOUGHTS:
        yield "think", partial(think_parser, ""), _text(beginning, repeated)


def _text(beginning: str, repeated: str) -> str:
    return beginning + repeated * ((SIZE - len(beginning)) // len(repeated))


def milliseconds(make: Callable[[], Parser], pieces: list[str]) -> float:
    parser = make()
    began = time.process_time()
    for piece in pieces:
        parser.push(piece)
    parser.flush()
    return (time.process_time() - began) * 1e3


def ordinary() -> Iterator[tuple[str, Callable[[], Parser], str]]:
    call = json.dumps({"text": "The craft of setting pieces of different woods into one surface. " * 400, "n": [1, 2]})
    written = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {call}}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {call}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{call}",
        "qwen3_coder": "<function=f>"
        + "".join(f"<parameter={key}>{value}</parameter>" for key, value in json.loads(call).items()),
        "pythonic": f"[f({', '.join(f'{key}={value!r}' for key, value in json.loads(call).items())})]",
    }
    for name, text in written.items():
        yield name, partial(tool_parser, name), text
    yield "think", partial(think_parser, "open"), "So it is, he said. " * 1400


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=5)
    rounds: int = arguments.parse_args().rounds
    worst: dict[str, tuple[float, str]] = {}
    for name, make, text in cases():
        best = min(milliseconds(make, [text]) for _ in range(rounds))
        worst[name] = max(worst.get(name, (0.0, "")), (best, f"{text[:40]!r}…"))
        print(json.dumps({"parser": name, "text": text[:60], "ms": round(best, 1)}), flush=True)
    for name, (slowest, shown) in worst.items():
        print(json.dumps({"parser": name, "worst_ms": round(slowest, 1), "text": shown}), flush=True)
    for name, make, text in ordinary():
        pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
        best = min(milliseconds(make, pieces) for _ in range(rounds))
        print(json.dumps({"parser": name, "us_per_token": round(best * 1e3 / len(pieces), 2)}), flush=True)


if __name__ == "__main__":
    main()
