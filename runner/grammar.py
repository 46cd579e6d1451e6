"""Grammars that constrain what is sampled: compiled to matchers, which say at each step which tokens may come next.

`GrammarCompiler` is used by the endpoint's threads, before a request is admitted, so that the engine never compiles;
`GrammarExecutor` by the engine, once a step for all constrained rows together. The work is llguidance's. A matcher
belongs to its sequence and not to a slot: it holds what has been *retired*, so a preemption leaves it as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from runner.cores import usable_cores
from runner.messages import GRAMMAR_LIMITS

Outcome = Literal["stop", "error"]
"""What a grammar ends a sequence with: it is complete and nothing can follow, or it cannot be followed any further."""

FAILED = "The grammar became too complex to follow, or the model has no token that continues it."

_PROTOTYPES = 64
"""Compiled grammars kept: a client asks for the same one again and again."""
_MAX_THREADS = 16
_FEW = 2
"""Masks that are computed in place: waking other threads up would take as long."""


class GrammarError(ValueError):
    """The grammar cannot be used. The message is fit for a client."""


@dataclass(eq=False, slots=True)
class Matcher:
    """One choice's place in its grammar."""

    state: LLMatcher
    ending_id: int
    """The id by which the library says that the grammar may end here."""
    mask_words: int
    """int32 words of a token mask."""


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A row whose token mask is wanted."""

    matcher: Matcher
    stop_ids: tuple[int, ...]
    """What ends the sequence where the grammar lets it."""
    is_early: bool
    """Before `min_tokens`: the stop ids are not wanted yet."""


class GrammarCompiler:
    """For the model in folder `path`. The tokenizer is read at the first grammar: most runners never see one."""

    def __init__(self, path: str, vocab_size: int, *, trust_remote_code: bool = False) -> None:
        self._path, self._vocab_size, self._trust_remote_code = path, vocab_size, trust_remote_code
        self._limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prototypes: OrderedDict[str, LLMatcher] = OrderedDict()
        """Matchers at the beginning of their grammar, the first mask computed; least recently used first."""

    def compile(self, grammar: str, n: int) -> list[Matcher]:
        """`n` matchers for `grammar` (see `SamplingParams`). Takes a millisecond as a rule, seconds at worst.

        Raises:
            GrammarError
        """
        tokenizer = self._get_tokenizer()
        prototype = self._prototype(grammar, tokenizer)
        words = -(-tokenizer.vocab_size // 32)
        return [Matcher(prototype.deep_copy(), tokenizer.eos_token, words) for _ in range(n)]

    def _prototype(self, grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
        with self._lock:
            known = self._prototypes.get(grammar)
            if known is not None:
                self._prototypes.move_to_end(grammar)
                return known
        made = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if not made.is_error():
            made.compute_bitmask()  # the most costly one, and some faults show only here
        if made.is_error():
            raise GrammarError("The grammar is not valid, or too complex.")
        with self._lock:
            self._prototypes[grammar] = made
            if len(self._prototypes) > _PROTOTYPES:
                self._prototypes.popitem(last=False)
        return made

    def _get_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer

    def _load_tokenizer(self) -> LLTokenizer:
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(self._path, trust_remote_code=self._trust_remote_code)
            return make_tokenizer(loaded, self._vocab_size)
        except Exception as error:  # whatever a model's files make the libraries raise
            raise GrammarError("Structured outputs are not possible with this model's tokenizer.") from error


def make_tokenizer(transformers_tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """The library's view of a fast tokenizer. Ids that it has no token for (a padded table) are never allowed.

    Raises ValueError for a tokenizer that it cannot work with.
    """
    backend = type(transformers_tokenizer.backend_tokenizer).from_str(transformers_tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    ending = transformers_tokenizer.eos_token_id
    if ending is None:
        raise ValueError("the tokenizer has no end-of-sequence token")
    size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ending)


class GrammarExecutor:
    """Masks and progress of a step's matchers; many masks at once, on a few threads of the library's own."""

    def __init__(self) -> None:
        # The engine's own thread waits for them, but the device's driver and the endpoint want a processor too.
        self._num_threads = min(_MAX_THREADS, usable_cores() - 1)
        self._pool: LLExecutor | None = None

    def _executor(self) -> LLExecutor:
        if self._pool is None:
            self._pool = LLExecutor(self._num_threads)
        return self._pool

    def fill(self, rows: list[MaskRow], masks: NDArray[np.int32]) -> list[Outcome | None]:
        """Computes the rows' masks.

        A row's stop ids are allowed where its grammar may end, and elsewhere only as the grammar's own text. Before
        `min_tokens` they are left out, unless nothing else could follow.

        Args:
            masks: [len(rows), mask_words], written; bit t of a row: token t may come next.

        Returns:
            Where no token can follow, how the sequence ends; its mask means nothing then.
        """
        matchers = [(row.matcher.state, index) for index, row in enumerate(rows)]
        broken = self._fill(matchers, masks)
        bits = masks.view(np.uint32)
        word, bit = divmod(rows[0].matcher.ending_id, 32)
        may_end = (bits[:, word] >> np.uint32(bit) & 1).astype(np.bool_).tolist()
        bits[:, word] &= ~np.uint32(1 << bit)
        return [
            "error" if index in broken else _finish_row(row, bits[index], ends)
            for index, (row, ends) in enumerate(zip(rows, may_end, strict=True))
        ]

    def consume(self, tokens: list[tuple[Matcher, int]]) -> list[Outcome | None]:
        """Moves each matcher on by one token; says which grammars are at their end."""
        # One by one: it takes microseconds, less than waking the threads up.
        return [_outcome(each.state, _survives(each.state.consume_token, token)) for each, token in tokens]

    def _fill(self, matchers: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> set[int]:
        """The rows that the library could not fill. It reports a grammar's faults by the matcher's state; should it
        raise all the same, that must not be the end of everybody's answers."""
        width = masks.shape[1] * 4
        if len(matchers) <= _FEW or self._num_threads < 2:
            return self._fill_alone(matchers, masks)
        try:
            self._executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, width, len(matchers))
        except BaseException as error:
            _pass_exits_on(error)
            return self._fill_alone(matchers, masks)
        return set()

    @staticmethod
    def _fill_alone(matchers: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> set[int]:
        width = masks.shape[1] * 4
        return {
            index
            for state, index in matchers
            if not _survives(state.unsafe_compute_mask_ptr, masks[index].ctypes.data, width)
        }


def _pass_exits_on(error: BaseException) -> None:
    """A panic of the library's is no `Exception` in Python, but neither are these."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


def _survives(call: Callable[..., object], *arguments: int) -> bool:
    try:
        return call(*arguments) is not False
    except BaseException as error:
        _pass_exits_on(error)
        return False


def _finish_row(row: MaskRow, bits: NDArray[np.uint32], may_end: bool) -> Outcome | None:
    if row.matcher.state.is_error():
        return "error"
    if not may_end and not row.is_early:
        return None
    stops = [divmod(token, 32) for token in row.stop_ids if token < 32 * len(bits)]
    if row.is_early and stops:
        kept = bits.copy()
        for word, bit in stops:
            kept[word] &= ~np.uint32(1 << bit)
        if kept.any():
            bits[:] = kept
            return None
    if may_end:
        for word, bit in stops:
            bits[word] |= np.uint32(1 << bit)
        if not stops and not bits.any():
            return "stop"
    return None


def _outcome(state: LLMatcher, consumed: bool) -> Outcome | None:
    if not consumed:
        return "error"
    if not state.is_stopped():
        return None
    return "stop" if state.is_accepting() else "error"
