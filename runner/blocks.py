"""The pool of KV blocks: who holds which block, which are free, and which free ones still hold a cached prefix.

Called by the scheduler only. Block 0 is never handed out: it is the dummy that padding rows write to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """Blocks 1 … num_blocks - 1, reference-counted.

    A block that nobody holds is free. If it was published (its rows are complete and its hash is known) it stays
    findable until it is handed out again; the one that was released longest ago goes first. All operations are O(1) a
    block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, 0, -1))
        """Free blocks that hold nothing; the last one goes first."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks that can be found; the first one goes first."""

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that can be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with undefined content; forgets what they cached. Raises `OutOfBlocks`."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        left = max(len(self._empty) - count, 0)
        blocks = self._empty[left:]
        del self._empty[left:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            digest = self._hashes[block]
            if digest is not None:
                del self._by_hash[digest]
                self._hashes[block] = None
            blocks.append(block)
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """Holds and returns the longest run of cached blocks whose hashes these are, from the first on."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a held block findable. Its rows must be complete; they don't change while it is findable."""
        # Two sequences may compute the same block at the same time: the first one published is the one found.
        if digest not in self._by_hash and self._hashes[block] is None:
            self._by_hash[digest] = block
            self._hashes[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Gives held blocks back. A sequence's last block is evicted before its first: prefixes are what is shared."""
        holders, hashes = self._holders, self._hashes
        for block in reversed(blocks):
            left = holders[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is not held")
            holders[block] = left
            if left == 0:
                if hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None
