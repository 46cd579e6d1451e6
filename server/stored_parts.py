"""The parts of a prompt that name stored embeddings, looked up. Called by `inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.errors import UnsupportedParameter
from server.prompt import StoredRows
from server.segments import EmbeddingPart, Part
from server.stored_embeddings import NoSuchEmbedding, StoredEmbeddings


async def find_stored(parts: Sequence[Part], store: StoredEmbeddings | None) -> Mapping[str, StoredRows]:
    """The stored embeddings that these parts name, by id: one question for all of them, none where there are none.

    Raises NoSuchEmbedding (404), UnsupportedParameter where this server stores none, Unavailable, EngineFailed.
    """
    named = {part.stored: part.where for part in parts if isinstance(part, EmbeddingPart) and part.stored}
    if not named:
        return {}
    if store is None:
        where = next(iter(named.values()))
        raise UnsupportedParameter(f"{where}: this server stores no embeddings.", param=where)
    found = await store.find(named)
    for each, where in named.items():
        if each not in found:
            raise NoSuchEmbedding(where)
    return {each: StoredRows(each, info.rows) for each, info in found.items()}
