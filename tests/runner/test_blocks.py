"""The block pool, by hand and against a naive model of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.blocks import BlockPool, OutOfBlocks


def test_the_dummy_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_has_a_block_beside_the_dummy(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(num_blocks)


def test_too_many_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert (pool.num_free, pool.num_used) == (2, 1)


def test_allocating_nothing() -> None:
    assert BlockPool(2).allocate(0) == []


def test_a_published_block_is_found_while_held_and_after() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.publish(a, b"A")
    assert pool.acquire([b"A", b"B"]) == [a]
    pool.release([a, b])
    assert pool.num_used == 1
    pool.release([a])
    assert pool.num_used == 0
    assert pool.acquire([b"A"]) == [a]
    assert pool.num_used == 1


def test_only_an_unbroken_run_from_the_first_on() -> None:
    pool = BlockPool(5)
    a, b, c = pool.allocate(3)
    pool.publish(a, b"A")
    pool.publish(c, b"C")
    assert pool.acquire([b"A", b"B", b"C"]) == [a]
    assert pool.acquire([b"B", b"C"]) == []
    assert pool.acquire([]) == []
    pool.publish(b, b"B")
    assert pool.acquire([b"A", b"B", b"C"]) == [a, b, c]


def test_a_block_that_is_handed_out_again_is_forgotten() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, b"A")
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.acquire([b"A"]) == []


def test_a_cached_block_in_use_is_not_evicted() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"A")
    pool.release([block])
    assert pool.acquire([b"A"]) == [block]
    assert pool.num_free == 1
    assert block not in pool.allocate(1)


def test_the_first_published_is_the_one_found() -> None:
    """Two sequences computed the same rows at the same time."""
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"A")
    pool.publish(b, b"A")
    pool.release([b])
    assert pool.acquire([b"A"]) == [a]


def test_a_block_keeps_its_first_hash() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"A")
    pool.publish(block, b"B")
    assert pool.acquire([b"B"]) == []
    assert pool.acquire([b"A"]) == [block]


def test_eviction_takes_empty_blocks_then_the_longest_unused_from_the_end_of_its_prefix() -> None:
    pool = BlockPool(7)
    old, new, rest = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for block in (*old, *new, rest[0]):
        pool.publish(block, b"%d" % block)
    pool.release(old)
    pool.release(new)
    pool.release(rest)
    assert pool.allocate(1) == [rest[1]]
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_use_renews() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"A")
    pool.publish(b, b"B")
    pool.release([a])
    pool.release([b])
    pool.release(pool.acquire([b"A"]))
    assert pool.allocate(1) == [b]
    assert pool.acquire([b"A"]) == [a]


def test_a_block_that_is_not_held_cant_be_given_back() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} is not held"):
        pool.release([block])


@dataclass
class _Naive:
    """What a block is, said as plainly as possible."""

    holders: int = 0
    content: bytes | None = None
    released_at: int = 0


@dataclass
class _Holder:
    """Someone who holds blocks, in order; those of `names` have that content."""

    blocks: list[int]
    names: list[bytes] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Sequences of a few possible contents (block i of content c is named "c/i") come and go."""

    NUM_BLOCKS = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.naive = {block: _Naive() for block in range(1, self.NUM_BLOCKS)}
        self.holders: list[_Holder] = []
        self.clock = 0

    def _free(self) -> list[int]:
        return [block for block, state in self.naive.items() if state.holders == 0]

    def _findable(self, name: bytes) -> int | None:
        return next((block for block, state in self.naive.items() if state.content == name), None)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free = self._free()
        if count > len(free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks) <= set(free)
        # Nothing that is cached goes while something empty is there, and what was used last goes last.
        kept = [self.naive[block] for block in set(free) - set(blocks)]
        for block in blocks:
            taken = self.naive[block]
            if taken.content is not None:
                assert all(k.content is not None and k.released_at >= taken.released_at for k in kept)
            self.naive[block] = _Naive(holders=1)
        self.holders.append(_Holder(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), content=st.sampled_from([b"x", b"y"]))
    def publish_next(self, data: st.DataObject, content: bytes) -> None:
        """A sequence completes its next block."""
        holder = data.draw(st.sampled_from(self.holders))
        if len(holder.names) == len(holder.blocks):
            return
        if holder.names:
            content = holder.names[0].split(b"/")[0]
        name = b"%s/%d" % (content, len(holder.names))
        block = holder.blocks[len(holder.names)]
        holder.names.append(name)
        self.pool.publish(block, name)
        if self._findable(name) is None:
            self.naive[block].content = name

    @rule(content=st.sampled_from([b"x", b"y"]), count=st.integers(0, 4))
    def acquire(self, content: bytes, count: int) -> None:
        names = [b"%s/%d" % (content, i) for i in range(count)]
        expected = []
        for name in names:
            block = self._findable(name)
            if block is None:
                break
            expected.append(block)
            self.naive[block].holders += 1
        assert self.pool.acquire(names) == expected
        if expected:
            self.holders.append(_Holder(expected, names[: len(expected)]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(holder.blocks)
        for block in reversed(holder.blocks):
            self.clock += 1
            self.naive[block].holders -= 1
            self.naive[block].released_at = self.clock

    @invariant()
    def counts_agree(self) -> None:
        free = len(self._free())
        assert self.pool.num_free == free
        assert self.pool.num_used == self.NUM_BLOCKS - 1 - free
        assert self.pool.num_cached == sum(self.naive[block].content is not None for block in self._free())


TestPoolMachine = pytest.mark.fuzz(pytest.mark.timeout(1800)(PoolMachine.TestCase))  # 1800 s: with --long
