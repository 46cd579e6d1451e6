"""The sampler's stages against independent references: transformers' own processors, or the formula written out."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runner.kernels.filters import apply_floors, filter_floors
from runner.kernels.penalties import apply_penalties
from runner.messages import EMBEDDING_ID, SamplingParams
from runner.sampler import Asks, LogitEdits, SamplingState, logprobs_of, pack, sample
from runner.slots import SlotState
from tests.parity.chi_square import p_value

CPU = torch.device("cpu")
VOCAB = 60


def params(**asks: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "temperature": 0.0, **asks})


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


def make_slots(prompts: list[list[int]], answers: list[list[int]]) -> SlotState:
    """A slot for each prompt and its answer so far, over what an earlier request has left there."""
    slots = SlotState.allocate(len(prompts), 16, 4, CPU)
    slots.fill_with_garbage(VOCAB, 4)
    for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor(prompt + answer, dtype=torch.int32)
        slots.token_ids[slot, : len(ids)] = ids
        slots.length[slot], slots.prompt_len[slot] = len(ids), len(prompt)
    return slots


def make_state(requests: list[SamplingParams]) -> SamplingState:
    state = SamplingState.allocate(len(requests), CPU)
    packed = torch.stack([torch.from_numpy(pack(request, 0)) for request in requests], dim=1)
    floats = len(state.floats)
    state.floats.copy_(packed[:floats].view(torch.float32))
    state.ints.copy_(packed[floats:])
    return state


def sample_one_each(
    logits: Tensor, requests: list[SamplingParams], slots: SlotState, edits: LogitEdits | None = None
) -> list[int]:
    """Request i is entry i and has slot i."""
    asks = Asks(any(request.penalises for request in requests), any(request.filters for request in requests))
    slot = torch.arange(len(requests))
    tokens = sample(logits.clone(), slot, slots, make_state(requests), asks, edits)
    return [int(token) for token in tokens]


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asks", "penalties", "filters"),
    [
        ({}, False, False),
        ({"temperature": 1.0}, False, False),
        ({"presence_penalty": 0.1}, True, False),
        ({"frequency_penalty": -0.1}, True, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"temperature": 1.0, "top_p": 0.9}, False, True),
        ({"temperature": 1.0, "top_k": 5}, False, True),
        ({"temperature": 1.0, "min_p": 0.1}, False, True),
        # Greedy takes the best token, which no filter removes.
        ({"top_p": 0.9, "top_k": 5, "min_p": 0.1}, False, False),
    ],
)
def test_a_stage_runs_only_for_those_who_ask(asks: dict[str, Any], penalties: bool, filters: bool) -> None:
    assert Asks.of(params(**asks)) == Asks(penalties, filters)


# --- filters --------------------------------------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": 10 * VOCAB},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.7},
    {"top_k": 30, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 12, "top_p": 0.6, "min_p": 0.03},
]


def reference_filter(logits: Tensor, temperature: float, asks: dict[str, Any]) -> Tensor:
    """[rows, vocab]: at the temperature, -inf at what is filtered."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "min_p" in asks:
        processors.append(MinPLogitsWarper(asks["min_p"]))
    if "top_k" in asks:
        processors.append(TopKLogitsWarper(asks["top_k"]))
    if "top_p" in asks:
        processors.append(TopPLogitsWarper(asks["top_p"]))
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    scores: Tensor = processors(ids, logits.clone())
    return scores


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_filters_keep_what_transformers_keeps(temperature: float) -> None:
    """All kinds of request in one batch, twenty rows of each."""
    rows = 20
    logits = random_logits(rows * len(FILTERS))
    requests = [params(temperature=temperature, **asks) for asks in FILTERS for _ in range(rows)]
    floors = filter_floors(logits, torch.arange(len(logits)), make_state(requests))
    filtered = apply_floors(logits, floors)
    for i, asks in enumerate(FILTERS):
        block = slice(i * rows, (i + 1) * rows)
        expected = reference_filter(logits[block], temperature, asks)
        kept = expected.isfinite()
        assert torch.equal(filtered[block].isfinite(), kept), asks
        assert torch.equal(filtered[block][kept], logits[block][kept]), asks


@pytest.mark.parametrize("asks", [{"top_p": 0.0}, {"top_p": 1e-30}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_best_token_always_stays(asks: dict[str, Any]) -> None:
    logits = random_logits(30)
    requests = [params(temperature=1.0, seed=i, **asks) for i in range(30)]
    slots = make_slots([[1]] * 30, [[]] * 30)
    assert sample_one_each(logits, requests, slots) == logits.argmax(-1).tolist()


def test_filters_of_a_neighbour_change_nothing() -> None:
    """Greedy and unfiltered entries of a step in which others filter."""
    logits = random_logits(4)
    plain = [params(), params(temperature=1.2, seed=5), params(temperature=0.4, seed=6)]
    slots = make_slots([[1]] * 4, [[]] * 4)
    without = sample_one_each(logits, [*plain, params()], slots)
    beside = sample_one_each(logits, [*plain, params(temperature=1.0, top_k=2, top_p=0.5)], slots)
    assert without[:3] == beside[:3]


# --- penalties ------------------------------------------------------------------------------------------------------


def reference_penalties(
    logits: list[float], prompt: list[int], answer: list[int], presence: float, frequency: float, repetition: float
) -> list[float]:
    """Repetition: Keskar et al. 2019, section 4.1, for every id of prompt and answer; presence and frequency: OpenAI's
    published formula, for the answer's."""
    counts = Counter(answer)
    seen = set(prompt) | set(answer)
    result = []
    for token, logit in enumerate(logits):
        value = logit
        if token in seen:
            value = value / repetition if value > 0 else value * repetition
        value -= counts[token] * frequency + (counts[token] > 0) * presence
        result.append(value)
    return result


E = EMBEDDING_ID
PENALISED: list[tuple[list[int], list[int], dict[str, float]]] = [
    ([1, 2, 3], [4, 4, 5], {}),
    ([1, 2, 3], [4, 4, 5], {"presence_penalty": 0.7}),
    ([1, 2, 3], [4, 4, 5], {"frequency_penalty": 1.3}),
    ([1, 2, 3], [4, 4, 5], {"frequency_penalty": -1.3, "presence_penalty": -0.2}),
    ([1, 2, 3, 3], [3, 5, 5, 5], {"repetition_penalty": 1.8}),
    ([1, 2, 3], [4], {"repetition_penalty": 0.4}),
    ([1, 2, 3], [4, 2], {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.9}),
    ([E, E, E], [4, 2], {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.9}),
    # One embedding row must not save the tokens around it.
    ([7, E, 8, E], [7], {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.9}),
    ([0], [VOCAB - 1], {"repetition_penalty": 3.0}),
    ([1, 2, 3], [], {"repetition_penalty": 2.0, "frequency_penalty": 2.0}),
]


def test_penalties_are_the_formulas() -> None:
    """All in one batch: what one asks for is nothing to the others."""
    logits = random_logits(len(PENALISED))
    slots = make_slots([p for p, _, _ in PENALISED], [a for _, a, _ in PENALISED])
    state = make_state([params(**asks) for _, _, asks in PENALISED])
    result = logits.clone()
    apply_penalties(result, torch.arange(len(PENALISED)), slots, state)
    for row, before, (prompt, answer, asks) in zip(result, logits, PENALISED, strict=True):
        expected = reference_penalties(
            before.tolist(),
            [token for token in prompt if token != E],
            answer,
            asks.get("presence_penalty", 0.0),
            asks.get("frequency_penalty", 0.0),
            asks.get("repetition_penalty", 1.0),
        )
        torch.testing.assert_close(row, torch.tensor(expected))


def test_repetition_penalty_is_transformers() -> None:
    logits = random_logits(1)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    slots = make_slots([ids[:5]], [ids[5:]])
    result = logits.clone()
    apply_penalties(result, torch.tensor([0]), slots, make_state([params(repetition_penalty=1.7)]))
    torch.testing.assert_close(result, RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone()))


def test_entries_read_their_own_slots() -> None:
    """Entries are packed, slots are not."""
    logits = random_logits(2)
    slots = make_slots([[1], [2], [3]], [[10], [11], [12]])
    result = logits.clone()
    apply_penalties(result, torch.tensor([2, 0]), slots, make_state([params(presence_penalty=5.0)] * 3))
    assert (result - logits).nonzero().tolist() == [[0, 12], [1, 10]]


# --- edits and the order of the stages ------------------------------------------------------------------------------


def edits(by_entry: dict[int, dict[int, float]]) -> LogitEdits:
    flat = [(entry * VOCAB + token, value) for entry, values in by_entry.items() for token, value in values.items()]
    return LogitEdits(torch.tensor([place for place, _ in flat]), torch.tensor([value for _, value in flat]))


def test_edits_change_their_own_entry() -> None:
    logits = random_logits(3)
    slots = make_slots([[1]] * 3, [[]] * 3)
    best = logits.argmax(-1).tolist()
    tokens = sample_one_each(logits, [params()] * 3, slots, edits({1: {7: 100.0}, 2: {best[2]: -math.inf}}))
    assert tokens[0] == best[0]
    assert tokens[1] == 7
    assert tokens[2] == int(logits[2].topk(2).indices[1])


def test_biases_add_up_with_penalties_and_come_before_the_filters() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1:4] = torch.tensor([5.0, 4.0, 3.0])
    slots = make_slots([[50]], [[1]])
    request = params(temperature=1.0, top_k=1, presence_penalty=2.0)
    assert sample_one_each(logits, [request], slots) == [2]
    assert sample_one_each(logits, [request], slots, edits({0: {1: 1.5}})) == [1]
    assert sample_one_each(logits, [request], slots, edits({0: {9: 4.5}})) == [9]


def test_a_banned_token_is_never_drawn() -> None:
    n = 500
    logits = torch.zeros(n, VOCAB)
    banned = edits({entry: dict.fromkeys(range(1, VOCAB), -math.inf) for entry in range(n)})
    slots = make_slots([[1]] * n, [[]] * n)
    requests = [params(temperature=5.0, seed=seed, top_p=0.99) for seed in range(n)]
    assert sample_one_each(logits, requests, slots, banned) == [0] * n


# --- draws ----------------------------------------------------------------------------------------------------------

DRAWS = 20_000


@pytest.mark.parametrize(
    "asks",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.04},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=lambda asks: "+".join(asks),
)
def test_draws_follow_the_distribution(asks: dict[str, Any]) -> None:
    logits = random_logits(1)
    filters = {name: value for name, value in asks.items() if name != "temperature"}
    expected = reference_filter(logits, asks["temperature"], filters).softmax(-1)[0]
    slots = SlotState.allocate(DRAWS, 2, 4, CPU)
    slots.length.fill_(1)
    requests = [params(seed=seed, **asks) for seed in range(DRAWS)]
    draws = torch.tensor(sample_one_each(logits.expand(DRAWS, -1), requests, slots))
    assert p_value(draws, expected) > 0.001


def test_draws_of_one_seed_follow_the_distribution_over_the_positions() -> None:
    """A request's own tokens are as independent as those of different requests."""
    logits = random_logits(1)
    slots = SlotState.allocate(DRAWS, 2, 4, CPU)
    slots.length.copy_(torch.arange(DRAWS))
    requests = [params(temperature=1.0, seed=42)] * DRAWS
    draws = torch.tensor(sample_one_each(logits.expand(DRAWS, -1), requests, slots))
    expected = logits.softmax(-1)[0]
    assert p_value(draws, expected) > 0.001
    # Neighbours, too: the joint distribution of two positions in a row.
    few = torch.tensor([0.5, 0.3, 0.2])
    few_logits = few.log()[None].expand(DRAWS, -1)
    draws = torch.tensor(sample_one_each(few_logits, requests, slots))
    pairs = draws[:-1:2] * 3 + draws[1::2]
    assert p_value(pairs, torch.outer(few, few).flatten()) > 0.001


def test_entries_draw_with_what_their_own_slots_ask() -> None:
    """Entries are packed, slots are not: a free slot lies between them."""
    logits = random_logits(1).expand(2, -1)
    requests = [params(temperature=1.0, seed=1, top_k=3), params(), params(temperature=2.0, seed=2)]
    slots = make_slots([[1], [1, 2], [1, 2, 3]], [[], [], []])
    state, asks = make_state(requests), Asks(filters=True)

    def draw(*slot: int) -> list[int]:
        entries = logits[: len(slot)].clone()
        return [int(token) for token in sample(entries, torch.tensor(slot), slots, state, asks, None)]

    assert draw(2, 0) == [*draw(2), *draw(0)]
    for seed in range(20):
        state.ints[2] = torch.tensor([seed, 0, seed + 100])  # the low words
        assert draw(2, 0) == [*draw(2), *draw(0)]


def test_the_choice_and_both_words_of_the_seed_count() -> None:
    n = 200
    logits = random_logits(1).expand(n, -1)
    slots = make_slots([[1]] * n, [[]] * n)
    state = make_state([params(temperature=1.5)] * n)
    alone = sample(logits.clone(), torch.arange(n), slots, state, Asks(), None)
    assert len(set(alone.tolist())) == 1
    for field in range(1, 4):
        other = make_state([params(temperature=1.5)] * n)
        other.ints[field] = torch.arange(n)
        draws = sample(logits.clone(), torch.arange(n), slots, other, Asks(), None)
        assert len(set(draws.tolist())) > 15


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 30]] = 1.0
    assert sample_one_each(logits, [params()], make_slots([[1]], [[]])) == [9]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**63), 2**63 - 1])
def test_seeds_survive_the_packing(seed: int) -> None:
    """Low and high word of a signed 64-bit number."""
    *_, low, high = pack(params(seed=seed), 0).tolist()
    assert (high << 32) | (low & 0xFFFFFFFF) == seed


def test_packing_keeps_every_parameter() -> None:
    request = params(
        temperature=0.7,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        top_k=40,
    )
    packed = torch.from_numpy(pack(request, 6))
    assert packed[:6].view(torch.float32).tolist() == pytest.approx([0.7, 0.9, 0.1, -1.5, 0.25, 1.2])
    assert packed[6:8].tolist() == [40, 6]


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_log_softmax() -> None:
    logits = random_logits(6)
    tokens = torch.tensor([0, 5, VOCAB - 1, 3, 3, 9])
    result = logprobs_of(logits, tokens, 4)
    for i, token in enumerate(tokens.tolist()):
        row = [float(x) for x in logits[i].double()]
        total = math.log(sum(math.exp(x) for x in row))
        order = sorted(range(VOCAB), key=lambda t: -row[t])
        assert float(result.logprob[i]) == pytest.approx(row[token] - total, abs=1e-5)
        assert int(result.rank[i]) == order.index(token) + 1
        assert result.top_tokens[i].tolist() == order[:4]
        assert result.top_logprobs[i].tolist() == pytest.approx([row[t] - total for t in order[:4]], abs=1e-5)


def test_no_alternatives() -> None:
    result = logprobs_of(random_logits(2), torch.tensor([1, 2]), 0)
    assert result.top_tokens.shape == result.top_logprobs.shape == (2, 0)


def test_ranks_of_equals_are_equal() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]]).expand(4, -1)
    assert logprobs_of(logits, torch.arange(4), 0).rank.tolist() == [3, 1, 1, 4]
