"""Who shares cached blocks with whom: requests with requests, siblings with siblings, and strangers never."""

from __future__ import annotations

import pytest
import torch

from tests.models import embed
from tests.parity.harness import Harness, Prompt
from tests.parity.reference import sample
from tests.parity.shelf import EngineShelf

BLOCK = 8

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "cached"),
    [
        (BLOCK - 1, 0),
        (BLOCK, 0),  # All of it is cached, and its last row has to be computed: not within a block that others read.
        (BLOCK + 1, BLOCK),
        (3 * BLOCK, 2 * BLOCK),
        (3 * BLOCK + 1, 3 * BLOCK),
    ],
)
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "embeds"])
def test_a_prompt_asked_before(shelf: EngineShelf, embedded: bool, length: int, cached: int) -> None:
    """Every whole block but the one that the last row is in."""
    harness = shelf.engine("llama", block_size=BLOCK)
    s = sample(shelf.path("llama"), length)
    prompt: Prompt = s.rows if embedded else s.ids
    salt = f"{embedded} {length}"
    first = harness.generate(prompt, salt=salt)
    hits = harness.engine.stats().prefix_hits
    second = harness.generate(prompt, salt=salt)
    assert first.tokens == second.tokens == s.tokens
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert harness.engine.stats().prefix_hits == hits + cached


def test_answers_are_cached_too(shelf: EngineShelf) -> None:
    """The next turn of a conversation begins with the last one's prompt and answer."""
    harness = shelf.engine("llama", block_size=BLOCK, async_scheduling=True)
    s = sample(shelf.path("llama"), 12)
    assert harness.generate(s.ids, 21, salt="turns").tokens == s.tokens[:21]
    # The answer's last token was never an input, so its row is not there.
    turn = harness.generate(s.ids + s.tokens[:21], 8, salt="turns")
    assert turn.cached_tokens == (12 + 20) // BLOCK * BLOCK == 32
    assert turn.tokens == s.tokens[21:29]


def test_equal_embeddings_share(shelf: EngineShelf) -> None:
    """By content: another tensor object, sent in other pieces, is the same prompt."""
    harness = shelf.engine("llama", block_size=BLOCK)
    s = sample(shelf.path("llama"), 24)
    harness.generate(s.rows, 2, salt="equal")
    answer = harness.generate((s.rows[:10].clone(), s.rows[10:].clone()), salt="equal")
    assert answer.cached_tokens == 16
    assert answer.tokens == s.tokens


@pytest.mark.parametrize("row", [0, 7, 8, 23])
def test_other_embeddings_do_not(shelf: EngineShelf, row: int) -> None:
    """One element of one row differs by its last bit: nothing from that row's block on is shared."""
    harness = shelf.engine("llama", block_size=BLOCK)
    s = sample(shelf.path("llama"), 25)
    harness.generate(s.rows, 2, salt=f"other {row}")
    changed = s.rows.clone()
    changed[row, 5] = torch.nextafter(changed[row, 5], torch.tensor(torch.inf))
    assert harness.generate(changed, 2, salt=f"other {row}").cached_tokens == row // BLOCK * BLOCK


def test_many_embeddings_with_equal_text(shelf: EngineShelf) -> None:
    """The same text around different embeddings, all at once: only the text before them is shared."""
    harness = shelf.engine("llama", block_size=BLOCK, async_scheduling=True, max_num_seqs=8)
    path = shelf.path("llama")
    texts = sample(path, 20)
    samples = [sample(path, 20 + 5 + 3, seed) for seed in range(8)]
    asked = []
    for s in samples:
        prompt: Prompt = (texts.ids[:16], s.rows[16:24], texts.ids[-4:])
        same_by_ids = texts.ids[:16] + s.ids[16:24] + texts.ids[-4:]
        asked.append((prompt, same_by_ids))
    alone = [harness.generate(ids, salt=f"alone {i}").tokens for i, (_, ids) in enumerate(asked)]
    assert len({tuple(tokens) for tokens in alone}) == 8
    for _ in range(2):
        numbers = [harness.add(prompt, salt="together") for prompt, _ in asked]
        harness.run()
        assert [harness.tokens(number) for number in numbers] == alone


def test_a_prefix_of_ids_is_shared_whatever_follows(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", block_size=BLOCK)
    s = sample(shelf.path("llama"), 24)
    harness.generate(s.ids, 2, salt="prefix")
    mixed = harness.generate((s.ids[:16], s.rows[16:]), salt="prefix")
    assert mixed.cached_tokens == 16
    assert mixed.tokens == s.tokens
    harness.generate((s.ids[:16], s.rows[16:]), 2, salt="the other way")
    plain = harness.generate(s.ids, salt="the other way")
    assert plain.cached_tokens == 16
    assert plain.tokens == s.tokens


def test_ids_and_their_embeddings_do_not_share(shelf: EngineShelf) -> None:
    """They would give the same rows, but nobody has looked the embeddings up in the table."""
    harness = shelf.engine("llama", block_size=BLOCK)
    s = sample(shelf.path("llama"), 24)
    harness.generate(s.ids, 2, salt="kinds")
    answer = harness.generate(s.rows, salt="kinds")
    assert answer.cached_tokens == 0
    assert answer.tokens == s.tokens


def test_salts_do_not_share(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", block_size=BLOCK)
    s = sample(shelf.path("llama"), 24)
    for salt in ("tenant 1", "tenant 2", "tenant", ""):
        assert harness.generate(s.ids, 2, salt=salt).cached_tokens == 0
        assert harness.generate(s.rows, 2, salt=salt).cached_tokens == 0
        assert harness.generate(s.ids, 2, salt=salt).cached_tokens == 16


def test_nothing_is_shared_without_prefix_caching(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", block_size=BLOCK, enable_prefix_caching=False)
    s = sample(shelf.path("llama"), 24)
    for _ in range(2):
        answer = harness.generate(s.ids)
        assert answer.cached_tokens == 0
        assert answer.tokens == s.tokens


# --- siblings -------------------------------------------------------------------------------------------------------


@overlap
@pytest.mark.parametrize("caching", [False, True], ids=["no caching", "caching"])
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "embeds"])
def test_siblings_share_their_prompts_blocks(shelf: EngineShelf, embedded: bool, caching: bool, overlap: bool) -> None:
    harness = shelf.engine(
        "llama",
        block_size=BLOCK,
        enable_prefix_caching=caching,
        async_scheduling=overlap,
        max_num_batched_tokens=8,
    )
    s = sample(shelf.path("llama"), 37)
    number = harness.add(s.rows if embedded else s.ids, n=4, salt=f"{embedded}")
    used = 0

    def between(step: int) -> None:
        nonlocal used
        used = max(used, harness.engine.stats().blocks_used)

    harness.run(between)
    for choice in range(4):
        answer = harness.answer(number, choice)
        assert answer.tokens == s.tokens
        assert answer.end is not None and answer.end.reason == "length"
        assert answer.cached_tokens == (32 if choice else 0)
    # Four whole blocks once, and of each choice the rest: 5 rows of the prompt and 31 of the answer.
    assert used <= 4 + 4 * 5
    harness.assert_empty()


def test_siblings_go_on_without_the_first(shelf: EngineShelf) -> None:
    """The one that they wait for is aborted in the middle of the prompt."""
    harness = shelf.engine("llama", block_size=BLOCK, async_scheduling=True, max_num_batched_tokens=8)
    s = sample(shelf.path("llama"), 37)
    number = harness.add(s.ids, n=3, salt="orphans")

    def between(step: int) -> None:
        if step == 2:
            harness.engine.abort((0, number), 0)

    harness.run(between)
    assert harness.tokens(number, 0) == []
    assert harness.tokens(number, 1) == harness.tokens(number, 2) == s.tokens
    harness.assert_empty()


def test_siblings_that_end_together_give_their_rows_back_once(shelf: EngineShelf) -> None:
    harness = shelf.engine("llama", block_size=BLOCK)
    rows = embed(shelf.path("llama"), sample(shelf.path("llama"), 24).ids)
    for n in (1, 2, 3, 5):
        number = harness.add(rows, 4, n=n)
        assert harness.engine.stats().row_bytes == rows.nbytes
        harness.run()
        assert all(len(harness.tokens(number, choice)) == 4 for choice in range(n))
        assert harness.engine.stats().row_bytes == 0


# --- what overflows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_a_row_that_overflows_is_nobody_else_s(shelf: EngineShelf, backend: str) -> None:
    """The rows before it are in the same tile of attention, where a weight of zero hides no NaN; their blocks are those
    of anybody whose prompt begins alike."""
    harness = Harness(shelf.path("qwen3"), dtype="float16", block_size=BLOCK, attention_backend=backend)
    decoder = harness.engine.model._decoder
    assert decoder is not None
    decoder.in_order[0].down.weight.data *= 20  # so that adding to the largest float16 gives infinity
    shared = sample(shelf.path("qwen3"), 3 * BLOCK).ids
    expected = harness.generate([*shared, 9], 8, salt="alone").tokens
    largest = torch.full((2, harness.engine.model.hidden_size), torch.finfo(torch.float16).max)
    largest[:, ::2] *= -1
    harness.generate((shared, largest), 2)
    answer = harness.generate([*shared, 9], 8)
    assert answer.cached_tokens == 3 * BLOCK
    assert answer.tokens == expected
    assert all(bool(values.isfinite().all()) for values in harness.engine.device.cache.values)
