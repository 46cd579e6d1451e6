"""What workers ask of the store of embeddings, answered. Called by the endpoint's receiving thread."""

from __future__ import annotations

import numpy as np

from runner.embedding_store import EmbeddingStore, NotStored, StoreFull, TooLarge
from runner.messages import DIGEST_BYTES, FindRows, ListRows, PutRows, StoreAnswer, ToStore


def answer(store: EmbeddingStore, message: ToStore, frames: list[memoryview], row_size: int) -> StoreAnswer:
    """`frames`: see `runner.messages`; kept as they are, not copied. `row_size`: bytes of one row."""
    number, owner = message.request, message.owner
    try:
        if isinstance(message, PutRows):
            return _put(store, message, frames, row_size)
        if isinstance(message, FindRows):
            return StoreAnswer(number, tuple(store.find(owner, message.ids)))
        if isinstance(message, ListRows):
            page, has_more = store.list(owner, message.after, message.limit, newest_first=message.newest_first)
            return StoreAnswer(number, tuple(page), has_more)
        return StoreAnswer(number, (store.delete(owner, message.id),))
    except NotStored:
        return StoreAnswer(number, problem="not_found")
    except TooLarge:
        return StoreAnswer(number, problem="too_large")
    except StoreFull:
        return StoreAnswer(number, problem="full")


def _put(store: EmbeddingStore, message: PutRows, frames: list[memoryview], row_size: int) -> StoreAnswer:
    if len(frames) != 2 or not frames[1].nbytes or frames[1].nbytes % row_size:
        return StoreAnswer(message.request, problem="invalid")
    rows = np.frombuffer(frames[1], np.uint8).reshape(-1, row_size)
    if frames[0].nbytes != len(rows) * DIGEST_BYTES:
        return StoreAnswer(message.request, problem="invalid")
    return StoreAnswer(message.request, (store.put(message.owner, message.sha256, rows, bytes(frames[0])),))
