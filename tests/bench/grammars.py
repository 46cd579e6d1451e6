"""What a grammar costs: compiling it, and a token mask of it, for the figures in docs/structured_outputs.md.

    python -m tests.bench.grammars [MODEL_FOLDER]

With xgrammar installed, its figures are printed beside llguidance's. CPU time of one thread.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from transformers import AutoTokenizer

from runner.default_model import default_model_path
from runner.grammar import make_tokenizer
from runner.messages import GRAMMAR_LIMITS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.[a-z]{2,3}$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "maxLength": 10}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
ADA = {
    "name": "Ada Lovelace of the Analytical Engine",
    "age": 36,
    "email": "ada.l@example.org",
    "tags": ["a", "c", "b"],
    "address": {"street": "12 St James's Square, London, a long street with words", "zip": "SW1Y"},
}


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    source: str
    text: str
    """Matches."""


CASES = [
    Case("a schema", "json", json.dumps(PERSON), json.dumps(ADA)),
    Case("any object", "json", '{"type": "object"}', json.dumps(ADA)),
    Case(
        "enum of 2,000",
        "json",
        json.dumps({"enum": [f"value {i} of {i * i}" for i in range(2000)]}),
        '"value 1234 of 1522756"',
    ),
    Case(
        "a regex", "regex", "([a-z]+ ){3,20}[0-9]{4}-[0-9]{2}-[0-9]{2}", "the quick brown fox jumps over it 2026-11-29"
    ),
]

Library = Callable[[Case], tuple[float, Callable[[], None], Callable[[int], bool]]]
"""(seconds of compiling, fill a mask, take a token)"""


def llguidance(tokenizer: Any) -> Library:
    inner = make_tokenizer(tokenizer, 0)
    limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
    mask: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(-(-inner.vocab_size // 32), np.int32)

    def compile(case: Case) -> tuple[float, Callable[[], None], Callable[[int], bool]]:
        make = LLMatcher.grammar_from_json_schema if case.kind == "json" else LLMatcher.grammar_from_regex
        started = time.process_time()
        matcher = LLMatcher(inner, make(case.source), log_level=0, limits=limits)
        seconds = time.process_time() - started
        return seconds, lambda: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes), matcher.consume_token

    return compile


def xgrammar(tokenizer: Any) -> Library:
    import xgrammar as library

    vocabulary = tokenizer.backend_tokenizer.get_vocab()
    info = library.TokenizerInfo(
        sorted(vocabulary, key=vocabulary.__getitem__),
        vocab_type=library.VocabType.BYTE_LEVEL,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = library.allocate_token_bitmask(1, info.vocab_size)

    def compile(case: Case) -> tuple[float, Callable[[], None], Callable[[int], bool]]:
        make = compiler.compile_json_schema if case.kind == "json" else compiler.compile_regex
        started = time.process_time()
        matcher = library.GrammarMatcher(make(case.source))
        seconds = time.process_time() - started
        return seconds, lambda: matcher.fill_next_token_bitmask(mask), matcher.accept_token

    return compile


def mask_seconds(token_ids: list[int], fill: Callable[[], None], take: Callable[[int], bool]) -> Iterator[float]:
    for token in token_ids:
        started = time.process_time()
        fill()
        yield time.process_time() - started
        if not take(token):
            raise RuntimeError("the text does not match its grammar")


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else default_model_path())
    libraries: dict[str, Library] = {"llguidance": llguidance(tokenizer)}
    if importlib.util.find_spec("xgrammar") is not None:
        libraries["xgrammar"] = xgrammar(tokenizer)
    print(f"{len(tokenizer)} tokens; compiling in ms, masks in µs")
    for case in CASES:
        ids = tokenizer.backend_tokenizer.encode(case.text, add_special_tokens=False).ids
        for name, compile in libraries.items():
            compile(case)  # warms up
            seconds, fill, take = compile(case)
            masks = sorted(mask_seconds(ids, fill, take))
            mean, worst = statistics.mean(masks) * 1e6, masks[-1] * 1e6
            print(f"{case.name:14} {name:10} compile {seconds * 1e3:8.1f}  mask mean {mean:8.0f}  worst {worst:8.0f}")


if __name__ == "__main__":
    main()
