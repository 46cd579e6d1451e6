"""Compiling what clients send, in real processes: what is valid, what is hostile, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import grammar_process
from server import grammars as grammars_module
from server.errors import APIError, QueueFull, UnsupportedParameter
from server.grammars import Grammars
from server.structured_outputs import constraint_of
from tests.models import VOCAB_SIZE
from tests.server.fakes import tokenizer


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


def nested(depth: int, options: int, kind: str) -> dict[str, Any]:
    """`options` ** `depth` leaves."""
    if not depth:
        return {"type": "string"}
    inner = nested(depth - 1, options, kind)
    return {kind: [{"type": "object", "properties": {f"p{i}": inner}} for i in range(options)]}


def overlapping(depth: int) -> dict[str, Any]:
    return {"type": "string"} if not depth else {"oneOf": [overlapping(depth - 1), {"type": ["string", "integer"]}]}


def contained(*letters: str) -> dict[str, Any]:
    """Strings with all these letters: an intersection of as many automata."""
    return {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in letters]}


HOSTILE: dict[str, dict[str, Any]] = {
    "a repeated repeat": {"guided_regex": "foo**"},
    "an open class": {"guided_regex": "["},
    "an open group": {"guided_regex": "(?P<"},
    "look-ahead": {"guided_regex": "(?=a)b"},
    "a back reference": {"guided_regex": "(a)\\1"},
    "a megabyte": {"guided_regex": "a" * 1_000_000},
    "no text at all": {"guided_regex": "[^\\x00-\\x{10ffff}]"},
    "a circle": {"guided_json": {"$ref": "#"}},
    "a circle of two": {
        "guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a circle in allOf": {
        "guided_json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"},
    },
    "another's document": {"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "depth 10,000": {"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "oneOf of depth 12": {"guided_json": nested(12, 2, "oneOf")},
    "anyOf of depth 12": {"guided_json": nested(12, 2, "anyOf")},
    "overlapping oneOf of depth 12": {"guided_json": overlapping(12)},
    "a huge enum": {"guided_json": {"enum": list(range(100_000))}},
    "what we cannot honour": {"guided_json": {"type": "array", "uniqueItems": True}},
    "a contradiction": {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "a wrong type": {"guided_json": {"type": "foo"}},
    "a lone surrogate": {"guided_json": '{"const": "\\ud800"}'},
    "an automaton of a million states": {"guided_json": contained(*"abcdefghijklmnopqrst")},
    "open brackets": {"guided_grammar": "root ::= " + "(" * 30_000},
    "deep brackets": {"guided_grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "an unknown rule": {"guided_grammar": "start: other"},
    "no grammar": {"guided_grammar": "\ufffd\x00{}[]"},
    "whitespace that explodes": {"guided_json": {}, "guided_whitespace_pattern": "("},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_a_400_in_time(grammars: Grammars, name: str) -> None:
    async def ask() -> None:
        async with asyncio.timeout(60):  # the product's limit is 4 s of waiting; this one is for a hang
            await grammars.compile(constraint_of(HOSTILE[name]))

    with pytest.raises(APIError) as caught:
        asyncio.run(ask())
    error = caught.value
    assert error.status == 400 and error.param in HOSTILE[name]
    assert len(error.message) < 700 and "\n" not in error.message and "/" not in error.message.partition("cannot")[0]


GOOD: dict[str, dict[str, Any]] = {
    "an object": {"response_format": {"type": "json_object"}},
    "anything": {"structured_outputs": {"json": "true"}},
    "recursion": {"guided_json": {"type": "object", "properties": {"next": {"$ref": "#"}}}},
    "options that exclude each other": {
        "guided_json": {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": value}}, "required": ["k"]} for value in ("a", "b")
            ]
        }
    },
    "many properties": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(300)}}},
    "a long enum": {"guided_json": {"enum": [f"value {i}" for i in range(2000)]}},
    "GBNF": {"guided_grammar": 'root ::= "a" | "b" root'},
    "Lark": {"guided_grammar": 'start: "a" | "b" start'},
    "choices": {"guided_choice": ['quo"te', "new\nline", "back\\slash", "é\u2028😀"]},
}


@pytest.mark.parametrize("name", GOOD)
def test_good_input_is_compiled(grammars: Grammars, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "WALL_SECONDS", 60.0)  # whatever else this machine is doing
    assert asyncio.run(grammars.compile(constraint_of(GOOD[name])))


def test_nothing_is_nothing(grammars: Grammars) -> None:
    assert asyncio.run(grammars.compile(None)) == ""


def test_the_runner_s_own_form(grammars: Grammars) -> None:
    good = asyncio.run(grammars.compile(constraint_of({"guided_regex": "a+"})))
    assert asyncio.run(grammars.check(good, "tools")) == good
    with pytest.raises(APIError) as caught:
        asyncio.run(grammars.check('{"grammars": [{"json_schema": {"type": "foo"}}]}', "tools"))
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_known_answers_cost_nothing(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is compiled once, however many ask, at once or later; an error is remembered as well."""
    asked: list[Any] = []
    real = grammars._ask

    def counting(job: Any) -> Any:
        asked.append(job)
        return real(job)

    monkeypatch.setattr(grammars, "_ask", counting)

    async def ask(pattern: str) -> Any:
        return await asyncio.gather(
            *(grammars.compile(constraint_of({"guided_regex": pattern})) for _ in range(8)), return_exceptions=True
        )

    first, second, third = asyncio.run(ask("known")), asyncio.run(ask("known")), asyncio.run(ask("kn(own"))
    assert len(set(first)) == 1 and first == second
    assert all(isinstance(each, APIError) for each in third) and asyncio.run(ask("kn(own")) is not None
    assert len(asked) == 2


def test_a_client_that_leaves_takes_nothing_from_others(grammars: Grammars) -> None:
    async def leave() -> str:
        constraint = constraint_of({"guided_regex": "leaving"})
        first = asyncio.create_task(grammars.compile(constraint))
        await asyncio.sleep(0)
        second = asyncio.create_task(grammars.compile(constraint))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert "leaving" in asyncio.run(leave())


def test_others_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the event loop nor the other process waits for a grammar that is given up after a second of CPU time,
    which here does not pass before the others are done."""
    monkeypatch.setattr(grammar_process, "WALL_SECONDS", 60.0)
    made = Grammars(tokenizer(), VOCAB_SIZE)

    async def both() -> list[str]:
        order: list[str] = []

        async def ask(name: str, body: dict[str, Any]) -> None:
            try:
                await made.compile(constraint_of(body))
            except APIError as error:
                assert "too complex" in error.message
            order.append(name)

        await ask("first", {"guided_regex": "first"})
        (process,) = made._processes
        pid = process._process.pid
        os.kill(pid, signal.SIGSTOP)
        slow = {"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 1000003}'}
        asking = asyncio.create_task(ask("slow", slow))
        async with asyncio.timeout(20):
            while not made._idle.empty():  # noqa: ASYNC110 - a thread takes it, and sets no event
                await asyncio.sleep(0.001)
        for i in range(20):
            await ask("quick", {"guided_regex": f"quick{i}"})
        os.kill(pid, signal.SIGCONT)
        await asking
        return order

    try:
        assert asyncio.run(both()) == ["first", *["quick"] * 20, "slow"]
    finally:
        made.close()


def test_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "_MAX_WAITING", 1)
    made = Grammars(tokenizer(), VOCAB_SIZE)

    async def ask() -> list[Any]:
        bodies = [{"guided_regex": "a"}, {"guided_regex": "b"}]
        return await asyncio.gather(*(made.compile(constraint_of(b)) for b in bodies), return_exceptions=True)

    try:
        one, two = asyncio.run(ask())
        assert isinstance(one, str) and isinstance(two, QueueFull)
    finally:
        made.close()


def test_a_large_grammar_with_many_prompts(grammars: Grammars) -> None:
    constraint = constraint_of({"guided_choice": ["x" * 60_000]})
    assert asyncio.run(grammars.compile(constraint, 100))
    with pytest.raises(APIError) as caught:
        asyncio.run(grammars.compile(constraint, 1000))
    assert caught.value.status == 400


def test_a_tokenizer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(tokenizer(), VOCAB_SIZE)
    monkeypatch.setattr(type(tokenizer()), "eos_token_id", None)
    with pytest.raises(UnsupportedParameter):
        asyncio.run(made.compile(constraint_of({"guided_regex": "a"})))
    made.close()


def test_no_process_is_left_behind() -> None:
    made = Grammars(tokenizer(), VOCAB_SIZE)
    asyncio.run(made.compile(constraint_of({"guided_regex": "a"})))
    (process,) = made._processes
    pid = process._process.pid
    made.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(APIError) as caught:
        asyncio.run(made.compile(constraint_of({"guided_regex": "b"})))
    assert caught.value.status == 503
