"""Prompts of which a part is embeddings and the rest token ids. Other servers don't take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pybase64

from server.bench.workloads import COMPLETIONS, Prepared, RandomEmbeds, encode, random_ids


@dataclass(frozen=True)
class Interleaved(RandomEmbeds):
    """Token ids, `input_len` rows of embeddings as RandomEmbeds makes them, token ids. No two prompts begin alike."""

    ids_before: int = field(default=1, kw_only=True)
    ids_after: int = field(default=1, kw_only=True)
    vocab_size: int = field(default=32_000, kw_only=True)

    def prepare(self, index: int) -> Prepared:
        ids = random_ids((self.seed, 10, index), self.ids_before + self.ids_after, self.vocab_size)
        _, header, shared, _ = self._pieces
        own = self._rows((self.seed, 3, index), min(self.OWN_ROWS, self.input_len))
        body = encode(self.common.body(self.common.output_len))
        pieces = (
            body[:-1] + b',"prompt":[' + encode(_part(ids[: self.ids_before])) + b',{"type":"prompt_embeds","data":"',
            pybase64.b64encode(header + own),
            shared,
            b'"},' + encode(_part(ids[self.ids_before :])) + b"]}",
        )
        return Prepared("interleaved", COMPLETIONS, pieces, self.common.output_len)


def _part(ids: list[int]) -> dict[str, Any]:
    return {"type": "token_ids", "token_ids": ids}
