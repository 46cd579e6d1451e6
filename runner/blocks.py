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
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_cached = 0
        """Free blocks that can be found."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with undefined content; forgets what they cached. Raises `OutOfBlocks`."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            digest = self._hashes[block]
            if digest is not None:
                del self._by_hash[digest]
                self._hashes[block] = None
                self.num_cached -= 1
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
                del self._free[block]
                self.num_cached -= 1
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
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders < 0:
                raise ValueError(f"block {block} is not held")
            self._holders[block] = holders
            if holders == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached += 1
