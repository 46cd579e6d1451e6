"""`filter_floors`: the reference against the rule applied token by token, the kernel against the reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.kernels.filters import NO_LAST, Floors, apply_floors, filter_floors, filter_floors_reference
from runner.kernels.filters_triton import filter_floors_triton
from runner.sampling_state import SamplingState

CPU = torch.device("cpu")
OFF: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def make_state(requests: list[dict[str, float]], num_slots: int = 0) -> tuple[Tensor, SamplingState]:
    """(slot, sampling): row i's request in a slot of its own, among others."""
    num_slots = max(num_slots, len(requests))
    slot = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))[: len(requests)]
    sampling = SamplingState.allocate(num_slots, CPU)
    sampling.floats.uniform_()
    sampling.ints.random_(0, 9)
    for index, request in zip(slot.tolist(), requests, strict=True):
        asks = OFF | request
        sampling.floats[:3, index] = torch.tensor([asks["temperature"], asks["top_p"], asks["min_p"]])
        sampling.ints[0, index] = int(asks["top_k"])
    return slot.int(), sampling


def random_request(rng: random.Random, vocab: int) -> dict[str, float]:
    request: dict[str, float] = {"temperature": rng.choice([0.0, 0.2, 0.7, 1.0, 2.0])}
    if rng.random() < 0.5:
        request["top_k"] = rng.choice([1, 2, 7, 20, vocab // 2, vocab, 10 * vocab])
    if rng.random() < 0.6:
        request["top_p"] = rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
    if rng.random() < 0.3:
        request["min_p"] = rng.choice([0.001, 0.05, 0.5, 1.0])
    return request


def random_logits(rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    """With equal ones among the best, and ruled out ones."""
    logits = (torch.randn(rows, vocab) * spread).to(dtype)
    logits[torch.rand(rows, vocab) < 0.1] = -torch.inf
    if dtype == torch.float32:
        logits[::2] = (logits[::2] * 2).round() / 2
    return logits


def on(device: torch.device, logits: Tensor, slot: Tensor, sampling: SamplingState) -> tuple[Any, ...]:
    state = SamplingState(sampling.floats.to(device), sampling.ints.to(device))
    return logits.to(device), slot.to(device), state


def kept(logits: Tensor, floors: Floors) -> Tensor:
    """[rows, vocab] bool. What was -inf before is never drawn, whether it is said to stay or not."""
    return apply_floors(logits, floors).isfinite()


def by_the_rule(row: list[float], request: dict[str, float], slack: float = 0.0) -> set[int]:
    """One token after the other, in Python's doubles. `slack` moves top_p's and min_p's lines, so that less stays."""
    asks = OFF | request
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if asks["temperature"] > 0:
        heat, best = asks["temperature"], row[order[0]]
        if asks["min_p"] > 0:
            line = best + heat * math.log(asks["min_p"])
            order = [token for token in order if row[token] >= line + slack * heat] or order[:1]
        if asks["top_k"] > 0:
            order = order[: int(asks["top_k"])]
        if asks["top_p"] < 1:
            mass = [math.exp((row[token] - best) / heat) for token in order]
            line, before, stays = (asks["top_p"] - slack) * sum(mass), 0.0, 0
            while stays < len(order) and (before < line or stays == 0):
                before += mass[stays]
                stays += 1
            order = order[:stays]
    return {token for token in order if row[token] > -math.inf}


def assert_by_the_rule(logits: Tensor, requests: list[dict[str, float]], floors: Floors) -> None:
    """Exactly what the rule leaves, but for a rounding at the line of top_p or min_p."""
    stays = kept(logits, floors)
    for i, request in enumerate(requests):
        row = logits[i].tolist()
        mine = set(stays[i].nonzero()[:, 0].tolist())
        assert by_the_rule(row, request, 3e-6) <= mine <= by_the_rule(row, request, -3e-6), request


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_is_the_rules(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    for vocab in (2, 50, 200, 3000):
        requests = [random_request(rng, vocab) for _ in range(40)]
        logits = random_logits(40, vocab, dtype)
        assert_by_the_rule(logits, requests, filter_floors(logits, *make_state(requests)))


def test_of_equals_at_the_cut_the_lowest_ids_stay() -> None:
    logits = torch.zeros(4, 300)
    logits[1:, [250, 40, 41]] = 5.0
    requests: list[dict[str, float]] = [{"top_k": 7}, {"top_k": 2}, {"top_p": 1e-9}, {"top_k": 5}]
    stays = kept(logits, filter_floors(logits, *make_state(requests)))
    ids = [row.nonzero()[:, 0].tolist() for row in stays]
    assert ids == [[*range(7)], [40, 41], [40], [0, 1, 40, 41, 250]]


def test_rows_that_do_not_ask_are_left_alone() -> None:
    requests: list[dict[str, float]] = [{}, {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.5}, {"top_k": 1}]
    floors = filter_floors(torch.randn(3, 50), *make_state(requests))
    assert floors.value[:2].tolist() == [-math.inf] * 2
    assert floors.last.tolist() == [NO_LAST] * 3
    assert floors.value[2] > -math.inf


def test_no_rows() -> None:
    assert filter_floors(torch.zeros(0, 7), *make_state([], 3)).value.shape == (0,)


# --- the kernel -----------------------------------------------------------------------------------------------------


def compare(logits: Tensor, requests: list[dict[str, float]], device: torch.device) -> None:
    slot, sampling = make_state(requests, len(requests) + 3)
    floors = filter_floors_triton(*on(device, logits, slot, sampling))
    floors = Floors(floors.value.cpu(), floors.last.cpu())
    stays, expected = kept(logits, floors), kept(logits, filter_floors_reference(logits, slot, sampling))
    same = (stays == expected).all(-1)
    assert float(same.float().mean()) >= 0.9
    few = (~same).nonzero()[:, 0].tolist()
    picked = [requests[i] for i in few]
    assert_by_the_rule(logits[few], picked, Floors(floors.value[few], floors.last[few]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [2, 700, 5003])
def test_filter_kernel(vocab: int, dtype: torch.dtype, triton_device: torch.device) -> None:
    torch.manual_seed(vocab)
    rng = random.Random(vocab)
    rows = 12 if triton_device.type == "cpu" else 200
    compare(
        random_logits(rows, vocab, dtype),
        [random_request(rng, vocab) for _ in range(rows)],
        triton_device,
    )


@pytest.mark.parametrize(
    "asks",
    [
        {"top_k": 4500},  # more than there are lanes: no bound, and too many for the list
        {"top_k": 4500, "top_p": 0.7},
        {"top_p": 0.97},  # nearly flat: the lanes' best don't reach so far
        {"top_p": 0.5, "min_p": 0.0001},
        {"min_p": 0.0001},
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=lambda asks: "+".join(f"{name}={value}" for name, value in asks.items()),
)
@pytest.mark.parametrize("equals", [False, True])
def test_filter_kernel_where_much_stays(asks: dict[str, float], equals: bool, triton_device: torch.device) -> None:
    """A vocabulary of several tiles and more tokens above the bound than the list holds."""
    torch.manual_seed(5)
    logits = torch.randn(2, 9500) * 0.1
    if equals:
        logits = (logits * 10).round() / 10
    compare(logits, [asks] * 2, triton_device)


def test_filter_kernel_breaks_ties_like_the_reference(triton_device: torch.device) -> None:
    requests: list[dict[str, float]] = [{"top_k": 7}, {"top_k": 2}, {"top_p": 1e-9}, {"top_k": 5}, {"top_p": 0.5}]
    for vocab in (300, 9000):
        logits = torch.zeros(5, vocab)
        logits[1:4, [250, 40, 41]] = 5.0
        logits[0, ::2] = -0.0
        floors = filter_floors_triton(*on(triton_device, logits, *make_state(requests)))
        stays = kept(logits, Floors(floors.value.cpu(), floors.last.cpu()))
        ids = [row.nonzero()[:, 0].tolist() for row in stays]
        assert ids[:4] == [[*range(7)], [40, 41], [40], [0, 1, 40, 41, 250]]
        assert ids[4] == [*range(vocab // 2)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_filter_kernel_ends_whatever_the_logits(bad: float, triton_device: torch.device) -> None:
    logits = torch.randn(4, 5000)
    logits[1:, ::2] = bad
    logits[2] = bad
    asks: list[dict[str, float]] = [
        {"top_k": 9},
        {"top_k": 9, "top_p": 0.5},
        {"top_p": 0.5},
        {"top_p": 0.9, "min_p": 0.1},
    ]
    floors = filter_floors_triton(*on(triton_device, logits, *make_state(asks)))
    first = kept(logits[:1], Floors(floors.value[:1].cpu(), floors.last[:1].cpu()))
    assert int(first.sum()) == 9  # the neighbours' are nothing to it


def test_filter_kernel_says_the_same_whatever_the_batch(triton_device: torch.device) -> None:
    torch.manual_seed(6)
    rng = random.Random(6)
    requests = [random_request(rng, 3000) for _ in range(6)]
    logits, slot, sampling = on(triton_device, random_logits(6, 3000, torch.bfloat16), *make_state(requests))
    together = filter_floors_triton(logits, slot, sampling)
    for i in range(6):
        alone = filter_floors_triton(logits[i : i + 1], slot[i : i + 1], sampling)
        assert torch.equal(alone.value, together.value[i : i + 1])
        assert torch.equal(alone.last, together.last[i : i + 1])
