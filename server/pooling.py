"""How embeddings are made of hidden states: what the operator, the model's folder and the request say, and the
arithmetic. Read by `services` at start, used by `text_embeddings`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from server.errors import InvalidRequest, UnsupportedParameter

logger = logging.getLogger(__name__)

Pooling = Literal["mean", "last"]

_MODES: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
"""As sentence-transformers names them."""


def load_pooling(folder: Path, configured: str) -> Pooling:
    """`configured`: what the operator says; "auto": what the model's folder does in sentence-transformers' way, else
    the mean, the better one of a model that was not trained for embeddings."""
    if configured != "auto":
        return cast(Pooling, configured)
    config = _read_json(folder / "1_Pooling" / "config.json")
    named = [str(config["pooling_mode"])] if "pooling_mode" in config else []
    named += [key.removeprefix("pooling_mode_") for key, value in config.items() if value is True]
    modes = {_MODES[name] for name in named if name in _MODES}
    if len(modes) == 1:
        return modes.pop()
    if config:
        logger.warning("the model's own pooling is neither mean nor last: /v1/embeddings takes the mean")
    return "mean"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Whether the first so many values of an embedding are an embedding (a Matryoshka model's)."""

    any_length: bool = False
    lengths: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Dimensions:
        """What the model's config.json says, in vLLM's words: `is_matryoshka`, `matryoshka_dimensions`."""
        config = _read_json(folder / "config.json")
        listed = config.get("matryoshka_dimensions")
        lengths = tuple(each for each in listed if type(each) is int) if isinstance(listed, list) else ()
        return cls(not lengths and config.get("is_matryoshka") is True, lengths)

    def check(self, asked: int | None, hidden_size: int) -> int:
        """How many values are kept. Raises InvalidRequest."""
        if asked is None or asked == hidden_size:
            return hidden_size
        if not self.any_length and not self.lengths:
            raise UnsupportedParameter(
                f"dimensions must be {hidden_size}: this model's embeddings cannot be cut.", param="dimensions"
            )
        if asked > hidden_size or (self.lengths and asked not in self.lengths):
            allowed = f"one of {', '.join(map(str, self.lengths))}" if self.lengths else f"at most {hidden_size}"
            raise InvalidRequest(f"dimensions must be {allowed}.", param="dimensions")
        return asked


def embedding_of(row: bytes, dtype: str, *, dimensions: int, normalize: bool) -> npt.NDArray[np.float32]:
    """[dimensions] of a pooled row in `dtype`; of length 1 if it is to be normalised. Raises ValueError where it is not
    finite: rows may overflow inside the model."""
    values = as_float32(row, dtype)[:dimensions]
    if not np.isfinite(values).all():
        raise ValueError
    if not normalize:
        return values
    norm = float(np.linalg.norm(values.astype(np.float64)))
    return (values / max(norm, 1e-12)).astype(np.float32)


def as_float32(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":  # numpy has none: it is a float32's upper half
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2").astype("<f4")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
