"""`python -m server.grammar_child`: compiles clients' grammars, one at a time, in a process that can be killed.

A grammar is a program of a stranger's. The compiler bounds most of what it can ask for, but not all of it, and a thread
that is stuck in it could not be stopped. Started by `grammar_process`; reads frames from standard input and answers on
standard output, and ends with its input. A frame is four bytes of length and a msgpack message.
"""

from __future__ import annotations

import os
import queue
import re
import resource
import signal
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from runner.messages import GRAMMAR_LIMITS

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CPU_SECONDS = 1
"""For one grammar. (The kernel counts whole seconds, so it may be up to one more.)"""
MEMORY_BYTES = 2 << 30
_MAX_MESSAGE_CHARS = 400

_PLACE, _LISTING = re.compile(r"^at \d+\(\d+\): "), re.compile(r"\n\s*\d+ \| ")
"""In the compiler's messages: where the fault is in a grammar's text, and the lines around it."""

DEFAULT_WHITESPACE = r"[ \t\r\n]{1,40}"
"""Between JSON's tokens. Bounded: nothing in the grammar keeps a model from whitespace without end."""


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first message: the model's tokenizer."""

    tokenizer: str
    """tokenizer.json's text"""
    vocab_size: int
    eos_token_id: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["json", "regex", "choice", "grammar", "compiled"]
    text: str
    """A JSON schema, a regular expression, a JSON list of strings, EBNF, GBNF or Lark; or what this process makes."""
    whitespace_pattern: str | None = None
    compact: bool = False


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """To every message. A grammar that comes without an `error` is valid and can be followed from its beginning."""

    grammar: str = ""
    error: str = ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(frames,), daemon=True).start()
    setup = msgspec.msgpack.decode(frames.get(), type=Setup)
    try:
        tokenizer = LLTokenizer(setup.tokenizer, n_vocab=setup.vocab_size, eos_token=setup.eos_token_id)
    except Exception:
        return write_frame(sys.stdout.buffer, Reply(error="tokenizer"))
    write_frame(sys.stdout.buffer, Reply())
    while True:
        job = msgspec.msgpack.decode(frames.get(), type=Job)
        limit = int(time.process_time()) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        write_frame(sys.stdout.buffer, compile_job(job, tokenizer))


def compile_job(job: Job, tokenizer: LLTokenizer) -> Reply:
    limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
    try:
        grammar = _grammar_of(job)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some faults show only here: nothing can match, or it is too complex
    except Exception as error:  # RecursionError and whatever else a text makes the converters raise
        return Reply(error=_plain(str(error), job))
    if matcher.is_error():
        return Reply(error=_plain(matcher.get_error(), job))
    return Reply(grammar)


def _grammar_of(job: Job) -> str:
    """In llguidance's own form."""
    if job.kind == "json":
        options: JsonCompileOptions = {"whitespace_pattern": job.whitespace_pattern or DEFAULT_WHITESPACE}
        if job.compact:
            options = {"whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(job.text, overrides=options)
    if job.kind == "regex":
        # Digits are 0 to 9, not those of every script: which those are depends on the age of a Unicode table.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(job.text, use_ascii='d')}/")
    if job.kind == "choice":
        choices = msgspec.json.decode(job.text, type=list[str])
        literals = " | ".join(msgspec.json.encode(each).decode() for each in choices)
        return LLMatcher.grammar_from_lark(f"start: {literals}")
    if job.kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(job.text))
    return job.text


def _plain(error: str, job: Job) -> str:
    """The compiler's message without its internals, as one line."""
    if job.kind == "compiled":  # ours: its lines mean nothing to anybody else
        error = _LISTING.split(_PLACE.sub("", error))[0]
    if error.startswith("panic"):
        return "too complex"
    for mark in ("<backtrace", "<state", "<non-verbose", "<grammar"):
        error = error.partition(mark)[0]
    if error.startswith("NoExtension"):
        return "nothing can match it"
    if "coerce_one_of" in error:
        return "oneOf needs options that exclude each other, by type or by a constant property (or use anyOf)"
    return " ".join(error.split())[:_MAX_MESSAGE_CHARS] or "not valid"


def write_frame(file: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(len(data).to_bytes(4, "little") + data)
    file.flush()


def _read(frames: queue.SimpleQueue[bytes]) -> None:
    """A thread of its own, so that the end of the input ends the process whatever it is at."""
    file = sys.stdin.buffer
    while True:
        header = file.read(4)
        size = int.from_bytes(header, "little")
        data = file.read(size) if len(header) == 4 else b""
        if len(header) < 4 or len(data) < size:
            os._exit(0)
        frames.put(data)


if __name__ == "__main__":
    main()
