"""The prefix cache's key: one hash chain per sequence, a link a block. The only place where a cache key is made.

A link covers its parent, the block's token ids (`EMBEDDING_ID` where a row is an embedding, so the ids carry the mask
too) and the digest of every embedding row in it. A latent step has no digest: it follows from the rows before it, and
so says what all of these say. The chain starts from the request's cache salt and a key drawn at
start, so that nobody can construct two prompts that collide.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from runner.messages import DIGEST_BYTES, EMBEDDING_ID

_KEY = secrets.token_bytes(32)


class BlockHashes:
    """The links of one prompt and its continuation, made as they are asked for."""

    def __init__(self, salt: bytes, block_size: int) -> None:
        self._block_size = block_size
        self.links: list[bytes] = []
        self._parent = blake2b(salt, key=_KEY, digest_size=DIGEST_BYTES).digest()
        self._digests_used = 0

    def fork(self) -> BlockHashes:
        """A copy that goes on by itself: siblings share the prompt's links, not the answer's."""
        other = BlockHashes.__new__(BlockHashes)
        other._block_size = self._block_size
        other.links = list(self.links)
        other._parent = self._parent
        other._digests_used = self._digests_used
        return other

    def extend(self, token_ids: NDArray[np.int32], row_digests: bytes) -> list[bytes]:
        """All links of the whole blocks in `token_ids`.

        Args:
            token_ids: [num_rows], the sequence's known rows from the first on.
            row_digests: one digest per embedding row of the sequence, in order.
        """
        size = self._block_size
        for start in range(len(self.links) * size, len(token_ids) - size + 1, size):
            ids = token_ids[start : start + size]
            link = blake2b(self._parent, key=_KEY, digest_size=DIGEST_BYTES)
            link.update(ids.tobytes())
            if row_digests:
                embeddings = int(np.count_nonzero(ids == EMBEDDING_ID))
                first = self._digests_used * DIGEST_BYTES
                link.update(row_digests[first : first + embeddings * DIGEST_BYTES])
                self._digests_used += embeddings
            self._parent = link.digest()
            self.links.append(self._parent)
        return self.links
