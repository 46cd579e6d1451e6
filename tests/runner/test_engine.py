"""The engine as its workers see it: what each message says, and what an abort or an end gives back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from runner.config import RunnerConfig
from runner.engine import Engine
from runner.limits import BadConfiguration
from runner.messages import StepOutput
from runner.model import UnsupportedModel
from runner.sequence import Request
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Family, hf_logits, random_prompt
from tests.parity.harness import Harness
from tests.parity.reference import Sample, sample

TinyModel = Callable[[Family], Path]

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


@pytest.fixture(scope="module")
def path(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture
def prompt(path: Path) -> Sample:
    return sample(path, 24)


def steps(harness: Harness, count: int) -> None:
    for _ in range(count):
        harness.engine.step()


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_the_model_is_described(path: Path) -> None:
    info = Harness(path, max_model_len=96, max_num_seqs=5, block_size=8, num_blocks=40).engine.info
    assert (info.path, info.model_type, info.dtype) == (str(path), "llama", "float32")
    assert (info.hidden_size, info.vocab_size) == (HIDDEN_SIZE, VOCAB_SIZE)
    assert (info.max_model_len, info.max_num_seqs, info.block_size, info.num_blocks) == (96, 5, 8, 40)


@overlap
def test_one_token_a_step_each_as_it_comes(path: Path, prompt: Sample, overlap: bool) -> None:
    """Streaming: nothing is held back, and what belongs to a step comes in one message."""
    messages: list[tuple[int, StepOutput]] = []
    harness = Harness(path, async_scheduling=overlap)
    harness.engine._emit = lambda worker, output: messages.append((worker, output))
    number = harness.add(prompt.ids, 5)
    other = harness.add(prompt.rows, 2, n=2)
    harness.run()
    assert {worker for worker, _ in messages} == {0}
    outputs = [output for _, output in messages]
    assert all(len(set(zip(o.requests, o.choices, strict=True))) == len(o.tokens) for o in outputs)
    tokens = [t for o in outputs for r, t in zip(o.requests, o.tokens, strict=True) if r == number]
    assert tokens == prompt.tokens[:5]
    assert [s.choice for o in outputs for s in o.started if s.request == other] == [0, 1]
    ends = {(e.request, e.choice): e for o in outputs for e in o.ends}
    assert set(ends) == {(number, 0), (other, 0), (other, 1)}
    # An end is in the message of the last token.
    (last,) = [o for o in outputs if any(e.request == number for e in o.ends)]
    assert number in last.requests
    assert all(o.logprobs == [] for o in outputs)


def test_workers_get_their_own(path: Path, prompt: Sample) -> None:
    """Requests of equal numbers from two workers, in one batch."""
    harness = Harness(path)
    sent: dict[int, list[StepOutput]] = {4: [], 9: []}
    harness.engine._emit = lambda worker, output: sent[worker].append(output)
    other = sample(path, 17)
    for worker, s in ((4, prompt), (9, other)):
        message, frames = harness.message(s.ids, 6)
        fields = {"worker": worker, "request": 1}
        harness.engine.add(
            Request.from_message(
                type(message)(**fields, n=1, sampling=message.sampling),  # type: ignore[arg-type]
                frames,
                vocab_size=VOCAB_SIZE,
                row_size=HIDDEN_SIZE * 4,
                max_model_len=128,
                block_size=16,
                private_cache=False,
            )
        )
    harness.run()
    for worker, s in ((4, prompt), (9, other)):
        assert [t for output in sent[worker] for t in output.tokens] == s.tokens[:6]
        assert {r for output in sent[worker] for r in output.requests} == {1}
        assert sum(len(output.ends) for output in sent[worker]) == 1


def test_started_says_how_long_it_waited(path: Path, prompt: Sample) -> None:
    harness = Harness(path, max_num_seqs=1)
    before = time.monotonic()
    first, second = harness.add(prompt.ids, 4), harness.add(prompt.ids, 4)
    adding = time.monotonic() - before
    harness.run()
    waits = [harness.answer(number).started for number in (first, second)]
    assert waits[0] is not None and waits[1] is not None
    # Each from when it was added, which the machine may have paused between.
    assert 0 <= waits[0].queue_seconds < waits[1].queue_seconds + adding
    assert waits[1].queue_seconds > 0
    assert (waits[0].cached_tokens, waits[1].cached_tokens) == (0, 16)


def test_a_preempted_request_starts_once(path: Path) -> None:
    """The harness refuses a second `Started`."""
    harness = Harness(path, block_size=4, num_blocks=33, async_scheduling=True)
    numbers = [harness.add(sample(path, 24).rows) for _ in range(6)]
    harness.run()
    assert harness.engine.stats().preemptions > 0
    assert all(harness.tokens(number) == sample(path, 24).tokens for number in numbers)


# --- how it ends ----------------------------------------------------------------------------------------------------


@overlap
def test_any_of_several_stop_tokens(path: Path, prompt: Sample, overlap: bool) -> None:
    harness = Harness(path, async_scheduling=overlap)
    token, expected = prompt.stop()
    absent = next(t for t in range(VOCAB_SIZE) if t not in prompt.tokens)
    later = next(t for t in reversed(prompt.tokens) if t not in expected)
    answer = harness.generate(prompt.ids, stop_token_ids=(absent, later, token))
    assert answer.tokens == expected
    assert answer.end is not None
    assert (answer.end.reason, answer.end.stop_token) == ("stop", token)


def test_without_stop_tokens_nothing_stops(path: Path, prompt: Sample) -> None:
    answer = Harness(path).generate(prompt.ids)
    assert answer.tokens == prompt.tokens
    assert answer.end is not None
    assert (answer.end.reason, answer.end.stop_token) == ("length", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 32])
@overlap
def test_max_tokens_are_exact(path: Path, prompt: Sample, max_tokens: int, overlap: bool) -> None:
    answer = Harness(path, async_scheduling=overlap).generate(prompt.ids, max_tokens)
    assert answer.tokens == prompt.tokens[:max_tokens]


@overlap
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "embeds"])
def test_the_context_can_be_filled_to_the_last_row(path: Path, embedded: bool, overlap: bool) -> None:
    s = sample(path, 24)
    harness = Harness(path, max_model_len=56, async_scheduling=overlap)
    assert harness.generate(s.rows if embedded else s.ids, 32).tokens == s.tokens


@overlap
def test_min_tokens_keep_stop_tokens_away(path: Path, prompt: Sample, overlap: bool) -> None:
    """Greedy among what is allowed, by the model's own logits: as if the stop token weren't there, and then as if it
    were."""
    stop, expected = prompt.stop()
    harness = Harness(path, async_scheduling=overlap)
    least = len(expected) + 3
    tokens: list[int] = []
    while len(tokens) < 32:
        logits = hf_logits(path, prompt.ids + tokens)[-1]
        if len(tokens) < least:
            logits = logits.index_fill(0, torch.tensor(stop), -torch.inf)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == stop:
            break
    answer = harness.generate(prompt.ids, stop_token_ids=(stop,), min_tokens=least)
    assert answer.tokens == tokens
    assert len(tokens) > len(expected)
    # As many as it would make anyway change nothing.
    assert harness.generate(prompt.ids, stop_token_ids=(stop,), min_tokens=len(expected) - 1).tokens == expected


def test_logit_bias_forbids_and_forces(path: Path, prompt: Sample) -> None:
    harness = Harness(path)
    best = prompt.tokens[0]
    expected = hf_logits(path, prompt.ids)[-1].topk(2).indices.tolist()
    assert expected[0] == best
    assert harness.generate(prompt.ids, 1, logit_bias=((best, -100.0),)).tokens == [expected[1]]
    assert harness.generate(prompt.ids, 8, logit_bias=((5, 100.0), (VOCAB_SIZE - 1, 50.0))).tokens == [5] * 8


def test_wishes_stay_with_their_request(path: Path, prompt: Sample) -> None:
    """Requests without any beside others with all of them, in the same steps."""
    harness = Harness(path, async_scheduling=True)
    wishes: list[dict[str, Any]] = [
        {"logit_bias": ((5, 100.0),)},
        {"presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"temperature": 2.0, "top_k": 3, "seed": 1},
        {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 20},
        {"logprobs": 5},
        {"prompt_logprobs": 5},
    ]
    plain = [harness.add(prompt.ids)]
    for wish in wishes:
        harness.add(prompt.ids, **wish)
    plain.append(harness.add(prompt.rows))
    harness.run()
    assert [harness.tokens(number) for number in plain] == [prompt.tokens] * 2


# --- aborts ---------------------------------------------------------------------------------------------------------


@overlap
def test_abort_in_the_queue(path: Path, prompt: Sample, overlap: bool) -> None:
    harness = Harness(path, max_num_seqs=1, async_scheduling=overlap)
    running, queued = harness.add(prompt.ids), harness.add(prompt.rows)
    steps(harness, 3)
    assert harness.engine.stats().waiting == 1
    assert harness.engine.stats().row_bytes == prompt.rows.nbytes
    harness.engine.abort((0, queued))
    assert harness.engine.stats().waiting == 0
    assert harness.engine.stats().row_bytes == 0
    harness.run()
    assert harness.tokens(running) == prompt.tokens
    assert harness.answer(queued).started is None
    harness.assert_empty()


@overlap
@pytest.mark.parametrize("after", [0, 1, 2, 5, 30])
def test_abort_frees_within_two_steps(path: Path, prompt: Sample, after: int, overlap: bool) -> None:
    """Before its first step, within its prompt, between tokens; nothing is said of it afterwards."""
    harness = Harness(path, async_scheduling=overlap, max_num_batched_tokens=8)
    number = harness.add(prompt.rows, 32, n=2)
    steps(harness, after)
    said = list(harness.tokens(number))
    harness.engine.abort((0, number))
    steps(harness, 2)
    harness.assert_empty()
    assert not harness.engine.has_work
    assert harness.tokens(number) == said
    assert harness.answer(number).end is None
    harness.engine.abort((0, number))
    harness.assert_empty()


@overlap
def test_abort_leaves_the_others_alone(path: Path, overlap: bool) -> None:
    """And their slots and blocks, when the freed ones go to somebody else at once."""
    harness = Harness(path, async_scheduling=overlap, max_num_seqs=4, block_size=4, num_blocks=57, max_model_len=56)
    samples = [sample(path, length) for length in (5, 12, 17, 24)]
    numbers = [harness.add(s.rows) for s in samples]
    late: list[int] = []

    def between(step: int) -> None:
        if step == 9:
            for number in (numbers[1], numbers[2]):
                harness.engine.abort((0, number))
            late.extend(harness.add(s.ids) for s in samples)

    harness.run(between)
    assert [harness.tokens(number) for number in (numbers[0], numbers[3])] == [samples[0].tokens, samples[3].tokens]
    assert [harness.tokens(number) for number in late] == [s.tokens for s in samples]
    harness.assert_empty()


def test_abort_of_one_choice(path: Path, prompt: Sample) -> None:
    harness = Harness(path, async_scheduling=True)
    number = harness.add(prompt.rows, n=3)
    steps(harness, 6)
    harness.engine.abort((0, number), 1)
    assert harness.engine.stats().row_bytes == prompt.rows.nbytes  # The others may still need them.
    harness.run()
    assert harness.tokens(number, 0) == harness.tokens(number, 2) == prompt.tokens
    assert harness.answer(number, 1).end is None
    harness.assert_empty()


def test_abort_of_a_worker(path: Path, prompt: Sample) -> None:
    harness = Harness(path)
    for _ in range(3):
        harness.add(prompt.rows)
    steps(harness, 2)
    harness.engine.abort_worker(1)
    assert len(harness.engine.scheduler.requests) == 3
    harness.engine.abort_worker(0)
    assert not harness.engine.has_work
    harness.assert_empty()


def test_abort_of_a_stranger(path: Path) -> None:
    harness = Harness(path)
    harness.engine.abort((0, 99))
    harness.assert_empty()


# --- numbers --------------------------------------------------------------------------------------------------------


def test_stats_count(path: Path, prompt: Sample) -> None:
    harness = Harness(path, block_size=8, num_blocks=100)
    assert harness.engine.stats().blocks_total == 99
    for _ in range(2):
        harness.add(prompt.rows, 9)
        steps(harness, 1)
    stats = harness.engine.stats()
    assert (stats.running, stats.waiting) == (2, 0)
    assert stats.row_bytes == 2 * prompt.rows.nbytes == 2 * 24 * HIDDEN_SIZE * 4
    # 24 rows and one that was sampled; the second prompt shares all but its last block.
    assert stats.blocks_used == 3 + 1 + 1
    harness.run()
    stats = harness.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.row_bytes) == (0, 0, 0, 0)
    # Both have computed the same 32 rows (the last token's never is): four blocks, found under one name each.
    assert stats.blocks_cached == 4
    assert stats.generated_tokens == 18
    assert (stats.prefix_queries, stats.prefix_hits) == (48, 16)
    assert stats.prompt_tokens == 24 + 8
    assert stats.steps == 10
    assert stats.preemptions == 0


@pytest.mark.parametrize("length", [1, 17, 33])
def test_every_prompt_row_is_counted(tiny_model: Callable[[Family], Path], length: int) -> None:
    """The last row of a prompt too, where it is all that is left: of a prompt of one row, of a last chunk, of a hit."""
    path = tiny_model("llama")
    harness = Harness(path, max_num_batched_tokens=8)
    for computed in (length, length % 16 or 16):
        before = harness.engine.stats().prompt_tokens
        harness.add(random_prompt(length, seed=length), 4)
        harness.run()
        assert harness.engine.stats().prompt_tokens - before == computed


# --- loading --------------------------------------------------------------------------------------------------------


def load(path: Path, **settings: Any) -> Engine:
    return Engine.load(RunnerConfig(model=str(path), device="cpu", **settings), lambda worker, output: None)


def test_loading_says_how_far_it_is(path: Path) -> None:
    stages: list[str] = []
    config = RunnerConfig(model=str(path), device="cpu", max_num_seqs=2)
    Engine.load(config, lambda worker, output: None, stages.append)
    assert len(stages) >= 2
    assert str(path) in stages[0]


def test_float16_needs_a_processor_that_converts_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.kernels.cpu.has_feature", lambda name: name != "f16c")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")  # others convert it, all of them
    with pytest.raises(BadConfiguration, match="--dtype bfloat16 or float32"):
        load(path, dtype="float16", max_num_seqs=2)


def test_readers_are_shielded_from_long_prompts_unless_the_operator_says_otherwise(path: Path) -> None:
    """Their next tokens come after 64 rows of others' prompts on a CPU, not after the step's whole budget."""
    for settings, expected in (({}, 64), ({"chunked_prefill_size": 100}, 100)):
        engine = load(path, **settings)
        assert engine.scheduler.budget == 512
        assert engine.scheduler.pace.least == engine.scheduler.pace.most == expected


def test_a_pool_too_small_for_one_request(path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--kv-cache-memory-bytes"):
        load(path, kv_cache_memory_bytes=1 << 16)


def test_a_context_longer_than_the_models(path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--max-model-len"):
        load(path, max_model_len=AutoConfig.from_pretrained(path).max_position_embeddings + 1)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="config"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_of_the_models_dtype(path: Path, dtype: str) -> None:
    """Embeddings and ids say the same in low precision, too: to the model they are the same bits."""
    harness = Harness(path, dtype=dtype)
    assert harness.engine.info.dtype == dtype
    ids = random_prompt(24, seed=1)
    table = harness.engine.model.embed(torch.tensor(ids))
    assert str(table.dtype) == f"torch.{dtype}"
    assert harness.generate(table).tokens == harness.generate(ids).tokens


def test_a_device_error_names_the_steps_in_flight(
    tiny_model: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny_model("llama"))

    def fails(*args: Any) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(harness.engine.device, "_choose", fails)
    harness.add(list(range(10, 17)), 4)
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        harness.run()
    assert caught.value.__notes__ == ["a step in flight: 7 rows in 1 entries, 0 of them decodes"]


def test_a_step_that_cannot_be_launched_is_named(
    tiny_model: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny_model("llama"))

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(harness.engine.device, "launch_forward", fails)
    harness.add(list(range(10, 17)), 4)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        harness.run()
    assert caught.value.__notes__ == ["the step that was being launched: 7 rows in 1 entries, 0 of them decodes"]
