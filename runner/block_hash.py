"""The prefix cache's key: one hash chain per sequence, a link a block. The only place where a cache key is made.

A link covers its parent, the block's token ids (`EMBEDDING_ID` where a row is an embedding, so the ids carry the mask
too), the digest of every embedding row in it, the bounds and the whole of every two-way span that it has a part of, and
position ids where they aren't the rows' own places. A latent step has no digest: it follows from the rows before it,
and so says what all of these say. The chain starts from the request's cache salt and a key drawn at start, so that
nobody can construct two prompts that collide.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from runner.messages import DIGEST_BYTES, EMBEDDING_ID

_KEY = secrets.token_bytes(32)
_EMPTY = blake2b(key=_KEY, digest_size=DIGEST_BYTES)
_SPAN, _POSITIONS = b"\1", b"\2"
"""What begins a part of a link that only some blocks have. Each such part's length follows from its first byte."""


@dataclass(frozen=True)
class TwoWaySpan:
    """Prompt rows start … end - 1, which attend to each other both ways: what is cached of one depends on all."""

    start: int
    end: int
    digest: bytes
    """Of all its rows."""


def position_offset(positions: NDArray[np.int32] | None) -> int:
    """What a row behind the prompt adds to its place to get its position id: it goes on from the largest."""
    return 0 if positions is None else int(positions.max()) + 1 - positions.shape[1]


class BlockHashes:
    """The links of one prompt and its continuation, made as they are asked for."""

    def __init__(
        self,
        salt: bytes,
        block_size: int,
        two_way: Sequence[TwoWaySpan] = (),
        positions: NDArray[np.int32] | None = None,
    ) -> None:
        """`two_way`: in order. `positions`: [3, prompt_len], where given; what follows goes on from the largest."""
        self._block_size = block_size
        self.links: list[bytes] = []
        self._parent = blake2b(salt, key=_KEY, digest_size=DIGEST_BYTES).digest()
        self._digests_used = 0
        self._two_way, self._positions = two_way, positions
        self._offset = position_offset(positions)

    def fork(self) -> BlockHashes:
        """A copy that goes on by itself: siblings share the prompt's links, not the answer's."""
        other = BlockHashes.__new__(BlockHashes)
        other._block_size = self._block_size
        other.links = list(self.links)
        other._parent = self._parent
        other._digests_used = self._digests_used
        other._two_way, other._positions, other._offset = self._two_way, self._positions, self._offset
        return other

    def extend(self, token_ids: NDArray[np.int32], row_digests: bytes) -> list[bytes]:
        """All links of the whole blocks in `token_ids`.

        Args:
            token_ids: [num_rows], the sequence's known rows from the first on.
            row_digests: one digest per embedding row of the sequence, in order.
        """
        size, first_row = self._block_size, len(self.links) * self._block_size
        blocks = token_ids[first_row : len(token_ids) // size * size].reshape(-1, size)
        counts: Iterable[int] = repeat(0)
        if row_digests:
            counts = np.count_nonzero(blocks == EMBEDDING_ID, axis=1).tolist()
        for start, ids, embeddings in zip(range(first_row, len(token_ids), size), blocks, counts, strict=False):
            link = _EMPTY.copy()  # in half the time of a new one
            link.update(self._parent)
            link.update(ids.tobytes())
            if embeddings:
                first = self._digests_used * DIGEST_BYTES
                link.update(row_digests[first : first + embeddings * DIGEST_BYTES])
                self._digests_used += embeddings
            for span in self._two_way:
                if span.start < start + size and start < span.end:
                    link.update(_SPAN + span.start.to_bytes(8) + span.end.to_bytes(8) + span.digest)
            if self._positions is not None:
                link.update(self._position_part(self._positions, start))
            self._parent = link.digest()
            self.links.append(self._parent)
        return self.links

    def _position_part(self, given: NDArray[np.int32], start: int) -> bytes:
        """Nothing where every row is at its own place, as in a prompt without images: they share."""
        places = np.arange(start, start + self._block_size, dtype=np.int32)
        prompt_len = given.shape[1]
        positions = np.broadcast_to(places + self._offset, (3, len(places))).copy()
        in_prompt = max(min(prompt_len - start, len(places)), 0)
        positions[:, :in_prompt] = given[:, start : start + in_prompt]
        return b"" if (positions == places).all() else _POSITIONS + positions.tobytes()
