"""Grammars in the engine: what is sampled follows them, whatever happens to the sequence, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoTokenizer

from runner import device_step
from runner.grammar import GrammarCompiler, GrammarError, GrammarExecutor, MaskRow
from runner.kernels import token_mask
from tests.models import EOS_ID, TURN_ID, VOCAB_SIZE, Family, hf_logits, random_prompt
from tests.parity.harness import Answer, Harness
from tests.parity.reference import sample

TinyModel = Callable[[Family], Path]

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])

REGEX = "(ab|cd){2,5}-[0-9]{4}!"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["oak", "elm"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def compiler(path: Path) -> GrammarCompiler:
    return GrammarCompiler(str(path), VOCAB_SIZE)


@pytest.fixture(scope="module")
def decode(path: Path) -> Callable[[list[int]], str]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def asks(seed: int, pattern: str = REGEX, **options: Any) -> dict[str, Any]:
    """A sampled request that must match `pattern`."""
    return {"temperature": 1.0, "seed": seed, "grammar": regex(pattern), "stop_token_ids": (EOS_ID,), **options}


# --- what is sampled --------------------------------------------------------------------------------------------------


@overlap
def test_every_choice_matches(path: Path, decode: Callable[[list[int]], str], overlap: bool) -> None:
    harness = Harness(path, async_scheduling=overlap)
    numbers = [harness.add(random_prompt(5 + 7 * i, i), 60, n=2, **asks(i)) for i in range(3)]
    schema = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    other = harness.add(random_prompt(9, 3), 90, **asks(8) | {"grammar": schema})
    harness.run()
    harness.assert_empty()
    texts = [decode(harness.tokens(number, choice)) for number in numbers for choice in (0, 1)]
    assert all(re.fullmatch(REGEX, text) for text in texts), texts
    assert len(set(texts)) == len(texts)  # a state shared between choices would show
    value = json.loads(decode(harness.tokens(other)))
    assert value["name"] in ("oak", "elm") and 0 <= value["age"] <= 99
    for number in (*numbers, other):
        end = harness.answer(number).end
        assert end is not None and (end.reason, end.stop_token) == ("stop", None)


@overlap
def test_others_in_the_batch_are_left_alone(path: Path, overlap: bool) -> None:
    """Beside constrained rows, before them and behind them, every unconstrained answer is the reference's."""
    samples = [sample(path, 8 + 9 * i) for i in range(4)]
    harness = Harness(path, async_scheduling=overlap)
    numbers = []
    for i, each in enumerate(samples):
        numbers.append(harness.add(each.ids if i % 2 else each.rows, 20))
        harness.add(random_prompt(6 + i, i), 40, **asks(i))
    harness.run()
    assert [harness.tokens(number) for number in numbers] == [each.tokens[:20] for each in samples]


@overlap
def test_greedy_is_the_best_allowed_token(path: Path, overlap: bool) -> None:
    """Against plain transformers: at each position the most probable of the tokens that the matcher's own check lets
    through (asked one by one, not by the mask)."""
    harness = Harness(path, async_scheduling=overlap)
    prompt, grammar = random_prompt(12, 4), regex("[a-f]{3}[0-9]{3}")
    number = harness.add(prompt, 30, grammar=grammar, stop_token_ids=(EOS_ID,), logprobs=0)
    harness.run()
    tokens = harness.tokens(number)
    logits = hf_logits(path, prompt + tokens)[len(prompt) - 1 : -1].double()
    (matcher,) = harness.grammars.compile(grammar, 1)
    for row, token, entry in zip(logits, tokens, harness.answer(number).logprobs, strict=True):
        allowed = [t for t in range(VOCAB_SIZE) if t != EOS_ID and matcher.state.validate_tokens([t])]
        assert token == max(allowed, key=lambda t: float(row[t]))
        assert matcher.state.consume_token(token)
        # Log-probabilities are the model's own, as if there were no grammar.
        assert entry is not None and entry.logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-4)


@overlap
def test_bans_choose_among_what_the_grammar_allows(
    path: Path, decode: Callable[[list[int]], str], compiler: GrammarCompiler, overlap: bool
) -> None:
    harness = Harness(path, async_scheduling=overlap)
    letters = {decode([token]): token for token in range(VOCAB_SIZE)}
    allowed = (letters["a"], letters["b"], EOS_ID)
    narrowed = [harness.add(random_prompt(9, i), 20, **asks(i, "[a-d]{6}", allowed_token_ids=allowed)) for i in (1, 2)]
    without = [harness.add(random_prompt(9, i), 20, **asks(i, "[ab]{6}", bad_words=((letters["a"],),))) for i in (1, 2)]
    # What the grammar wants and the ban forbids: this choice ends with an error, and no other.
    stuck = harness.add(random_prompt(9, 3), 20, **asks(3, "[cd]{6}", allowed_token_ids=allowed))
    # Complete, and the token that would say so is not allowed: it ends all the same.
    complete = harness.add(random_prompt(9, 5), 20, **asks(5, "[a-d]{6}", allowed_token_ids=allowed[:2]))
    # The only token that the grammar has left is not forbidden.
    forced = harness.add(random_prompt(9, 4), 20, **asks(4, "c{3}", bad_words=((letters["c"],),)))
    harness.run()
    harness.assert_empty()
    assert all(re.fullmatch("[ab]{6}", decode(harness.tokens(number))) for number in narrowed)
    assert [decode(harness.tokens(number)) for number in without] == ["b" * 6] * 2
    end = harness.answer(stuck).end
    assert end is not None and (end.reason, end.fault, harness.tokens(stuck)) == ("error", "request", [])
    assert re.fullmatch("[ab]{6}", decode(harness.tokens(complete)))
    end = harness.answer(complete).end
    assert end is not None and (end.reason, end.stop_token) == ("stop", None)
    assert decode(harness.tokens(forced)) == "ccc"


# --- whatever happens to the sequence -------------------------------------------------------------------------------


@overlap
def test_preemption_keeps_the_place(path: Path, decode: Callable[[list[int]], str], overlap: bool) -> None:
    """Too few blocks for all: sequences are thrown out in the middle of their grammar and go on where they were."""

    def run(**settings: Any) -> tuple[Harness, list[Answer]]:
        harness = Harness(path, async_scheduling=overlap, block_size=4, max_model_len=80, **settings)
        pattern = "(ab|cd|ef){8,12}-[0-9]{6}!"
        numbers = [harness.add(random_prompt(10, i), 60, **asks(i, pattern)) for i in range(5)]
        harness.run()
        harness.assert_empty()
        assert all(re.fullmatch(pattern, decode(harness.tokens(number))) for number in numbers)
        return harness, [harness.answer(number) for number in numbers]

    roomy, expected = run()
    tight, answers = run(num_blocks=24)
    assert (roomy.engine.stats().preemptions, tight.engine.stats().preemptions > 0) == (0, True)
    assert [each.tokens for each in answers] == [each.tokens for each in expected]


def test_a_cached_prefix_changes_nothing(path: Path) -> None:
    harness = Harness(path)
    prompt = random_prompt(40, 1)
    first = harness.generate(prompt, 40, **asks(5))
    second = harness.generate(prompt, 40, **asks(5))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert first.tokens == second.tokens


@overlap
def test_aborts_free_everything(path: Path, overlap: bool) -> None:
    harness = Harness(path, async_scheduling=overlap)
    numbers = [harness.add(random_prompt(10, i), 60, n=2, **asks(i, "(ab|cd)*")) for i in range(3)]
    harness.run(lambda step: harness.engine.abort((0, numbers[step % 3]), step % 2) if step > 3 else None)
    harness.assert_empty()


# --- ends ---------------------------------------------------------------------------------------------------------


@overlap
def test_ends(path: Path, decode: Callable[[list[int]], str], overlap: bool) -> None:
    harness = Harness(path, async_scheduling=overlap)
    prompt = random_prompt(10, 2)
    favour: dict[str, Any] = {"logit_bias": ((EOS_ID, 100.0),)}

    def end_of(pattern: str, max_tokens: int = 40, **options: Any) -> tuple[str, int | None, int]:
        answer = harness.generate(prompt, max_tokens, **asks(3, pattern, **options))
        assert answer.end is not None
        text = decode(answer.tokens)
        assert answer.end.reason == "length" or re.fullmatch(pattern, text), text
        return answer.end.reason, answer.end.stop_token, len(text)

    # The model may end only where the grammar may, however much it wants to; and it need not.
    assert end_of("x{3,9}", **favour) == ("stop", EOS_ID, 3)
    assert end_of("x{3,9}", logit_bias=((EOS_ID, -100.0),)) == ("stop", None, 9)
    # A stop token of the client's ends it just so.
    assert end_of("x{3,9}", stop_token_ids=(TURN_ID,), logit_bias=((TURN_ID, 100.0),)) == ("stop", TURN_ID, 3)
    # ignore_eos: as long as the grammar can go on, and no longer.
    assert end_of("x{3,9}", stop_token_ids=(), **favour) == ("stop", None, 9)
    assert end_of("x*", 12, stop_token_ids=(), **favour)[:2] == ("length", None)
    # min_tokens: not before, unless the grammar has nothing else to offer.
    assert end_of("x{3,90}", min_tokens=7, **favour)[:2] == ("stop", EOS_ID)
    assert len(harness.answers[max(harness.answers)].tokens) == 7 + 1
    assert end_of("x{3}", min_tokens=7, **favour) == ("stop", None, 3)
    # Not even where its text is a stop token's: there, nothing but that token is left.
    text = AutoTokenizer.from_pretrained(path)("x")["input_ids"][-1]
    answer = harness.generate(prompt, 40, **asks(3, "x{3}", stop_token_ids=(text,), min_tokens=7))
    assert answer.tokens == [text] and answer.end is not None and answer.end.stop_token == text
    # A grammar that only nothing matches.
    assert end_of("(a?){0}", stop_token_ids=()) == ("stop", None, 0)
    harness.assert_empty()


@overlap
def test_too_complex_ends_that_request_only(path: Path, overlap: bool) -> None:
    """The library gives up in the middle of a grammar whose ambiguity grows with the text."""
    ambiguous = LLMatcher.grammar_from_lark("start: a\na: a a a | a a | /[a-z]/")
    harness = Harness(path, async_scheduling=overlap, max_model_len=256)
    reference = sample(path, 20)
    bad = harness.add(random_prompt(10, 1), 200, **asks(1) | {"grammar": ambiguous, "stop_token_ids": ()})
    good = harness.add(reference.ids, 20)
    harness.run()
    harness.assert_empty()
    end = harness.answer(bad).end
    assert end is not None and end.reason == "error" and "too complex" in end.message
    assert harness.tokens(good) == reference.tokens[:20]


@overlap
def test_penalties_bias_and_filters_stay_inside(path: Path, decode: Callable[[list[int]], str], overlap: bool) -> None:
    harness = Harness(path, async_scheduling=overlap)
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": ((5, 100.0), (300, 100.0), (EOS_ID, 100.0))},
        {"top_k": 1},
        {"top_p": 0.01, "min_p": 0.9},
    ]
    numbers = [harness.add(random_prompt(10, 3), 60, **asks(2, **each)) for each in options]
    harness.run()
    assert all(re.fullmatch(REGEX, decode(harness.tokens(number))) for number in numbers)


# --- mutations ------------------------------------------------------------------------------------------------------


@overlap
def test_a_mask_that_is_not_uploaded_shows(path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """The fifth step samples with the masks of the fourth. The engine must notice, and must survive."""
    real, steps = token_mask.mask_logits, []

    def stale(logits: torch.Tensor, entries: torch.Tensor, masks: torch.Tensor) -> None:
        steps.append(masks.clone())
        real(logits, entries, steps[3] if len(steps) == 5 else masks)

    monkeypatch.setattr(device_step, "mask_logits", stale)
    harness = Harness(path, async_scheduling=overlap)
    answer = harness.generate(random_prompt(10, 2), 30, **asks(2, "[a-c][d-f][0-3][4-6][x-z][g-i]"))
    assert answer.end is not None and answer.end.reason == "error"
    harness.assert_empty()


class _Panicking:
    """In the place of the library's executor: it fails, and so does one of the matchers on its own."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise BaseException("panicked")  # as Rust's panics arrive

        return fail


def test_a_library_that_raises_is_not_the_end(path: Path, decode: Callable[[list[int]], str]) -> None:
    harness = Harness(path)
    harness.engine._grammars._num_threads = 4
    harness.engine._grammars._pool = _Panicking()  # type: ignore[assignment]
    numbers = [harness.add(random_prompt(9, i), 60, **asks(i)) for i in range(3)]
    harness.engine.step()
    sequence = harness.engine.scheduler.requests[0, numbers[0]][0]
    assert sequence.matcher is not None
    sequence.matcher.state = _Panicking()  # type: ignore[assignment]
    sequence.matcher.state.is_error = lambda: False  # type: ignore[method-assign]
    harness.run()
    harness.assert_empty()
    first, *others = (harness.answer(number) for number in numbers)
    assert first.end is not None and first.end.reason == "error"
    assert all(re.fullmatch(REGEX, decode(other.tokens)) for other in others)


# --- compiling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", ["", "start: (", "{", "[]", '{"grammars": []}', regex("["), "start: /a/ x"])
def test_nonsense_is_an_error(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(grammar, 1)


def test_choices_do_not_share_a_place(compiler: GrammarCompiler, path: Path) -> None:
    token = AutoTokenizer.from_pretrained(path)("a")["input_ids"][-1]
    one, two = compiler.compile(regex("a"), 2)
    executor = GrammarExecutor()
    assert executor.consume([(one, token)]) == ["stop"]
    assert executor.consume([(two, token)]) == ["stop"]
    (again,) = compiler.compile(regex("a"), 1)
    assert executor.consume([(again, token)]) == ["stop"]


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_are_the_matcher_s_own_verdicts(compiler: GrammarCompiler, threads: int) -> None:
    """Every bit, for many grammars at once, against the library's check of single tokens."""
    patterns = ["[a-m]+", "(the|a) answer", "\\d{1,3}", "(.|\\n)*", "x"]
    rows = [MaskRow(compiler.compile(regex(each), 1)[0], (EOS_ID,), False) for each in patterns]
    masks: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((len(rows), rows[0].matcher.mask_words), np.int32)
    random.Random(0).shuffle(rows)
    executor = GrammarExecutor()
    executor._num_threads = threads
    assert executor.fill(rows, masks) == [None] * len(rows)
    for row, mask in zip(rows, masks, strict=True):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        expected = [row.matcher.state.validate_tokens([token]) for token in range(VOCAB_SIZE)]
        assert bits.tolist() == expected


def test_a_padded_table_s_ids_are_never_allowed(path: Path) -> None:
    padded = GrammarCompiler(str(path), VOCAB_SIZE + 100)
    row = MaskRow(padded.compile(regex("(.|\\n)*"), 1)[0], (), False)
    mask: np.ndarray[Any, np.dtype[np.int32]] = np.full((1, row.matcher.mask_words), -1, np.int32)
    GrammarExecutor().fill([row], mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[:VOCAB_SIZE].sum() > VOCAB_SIZE // 2 and not bits[VOCAB_SIZE:].any()
