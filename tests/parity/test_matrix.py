"""The product's promise: the same prompt gives the same tokens, however it is sent and whatever else is going on.

`make test` runs a subset in which every three settings meet; `make matrix` runs the whole product.
"""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from tests.models import FAMILIES, Family
from tests.parity.covering import all_rows, combinations_of, covering
from tests.parity.reference import sample
from tests.parity.scenario import Kind, Scenario, check
from tests.parity.shelf import EngineShelf

AXES = {
    "family": FAMILIES,
    "kind": get_args(Kind),
    "overlap": (False, True),
    "chunked": (False, True),
    "tiny_pool": (False, True),
    "cache": ("off", "cold", "warm"),
    "batch": (1, 8),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        rows = all_rows(AXES) if metafunc.config.getoption("--long") else covering(AXES, strength=3)
        metafunc.parametrize("scenario", [Scenario(**row) for row in rows], ids=str)  # type: ignore[arg-type]


def test_parity(scenario: Scenario, shelf: EngineShelf) -> None:
    check(scenario, shelf)


def test_the_subset_has_every_triple() -> None:
    rows = covering(AXES, strength=3)
    covered = set().union(*(combinations_of(row, 3) for row in rows))
    for names in itertools.combinations(AXES, 3):
        for values in itertools.product(*(AXES[name] for name in names)):
            assert frozenset(zip(names, values, strict=True)) in covered
    assert len(rows) < len(all_rows(AXES)) / 10


@pytest.mark.parametrize("count", [1, 8, 64])
def test_any_number_at_once(shelf: EngineShelf, count: int) -> None:
    """Accuracy does not fall with concurrency."""
    harness = shelf.engine("llama", max_num_seqs=64, max_num_batched_tokens=96, async_scheduling=True)
    harness.fill_with_garbage(cache=True)
    samples = [sample(shelf.path("llama"), 5 + i % 8 * 4, seed=i // 32) for i in range(count)]
    prompts = [(s.ids, s.rows, s.pieces(seed=i))[i % 3] for i, s in enumerate(samples)]
    numbers = [harness.add(prompt, salt=f"{count} at once") for prompt in prompts]
    harness.run()
    assert [harness.tokens(number) for number in numbers] == [s.tokens for s in samples]
    harness.assert_empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_long_answers(shelf: EngineShelf, family: Family) -> None:
    """Many blocks and windows later."""
    harness = shelf.engine(family, max_model_len=160, async_scheduling=True)
    s = sample(shelf.path(family), 24, max_new_tokens=120)
    numbers = [harness.add(prompt, 120) for prompt in (s.ids, s.rows, s.pieces(seed=0))]
    harness.run()
    assert [harness.tokens(number) for number in numbers] == [s.tokens] * 3


# --- controls: what a mistake would look like, so that agreement means something -----------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_changed_changes_the_answer(shelf: EngineShelf, family: Family) -> None:
    harness = shelf.engine(family)
    prompt = sample(shelf.path(family), 24)
    other = sample(shelf.path(family), 31)
    for row in (0, 7, 23):
        rows = prompt.rows.clone()
        rows[row] = other.rows[row]
        assert harness.generate(rows).tokens != prompt.tokens
        ids = list(prompt.ids)
        ids[row] = other.ids[row]
        assert ids != prompt.ids
        assert harness.generate(ids).tokens != prompt.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_varied(shelf: EngineShelf, family: Family) -> None:
    for length in (1, 5, 24):
        tokens = shelf.engine(family).generate(sample(shelf.path(family), length).rows).tokens
        assert len(tokens) == 32
        assert len(set(tokens)) >= 8
