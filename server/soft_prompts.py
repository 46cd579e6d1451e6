"""Soft prompts: rows that were trained to stand before a prompt, served under a name. Read once, at the start
(`Services` loads them); `inputs` puts their rows into prompts.

One is a PEFT adapter's folder (`adapter_config.json` beside `adapter_model.safetensors`) or a safetensors file of one
tensor, [rows, hidden size]. PEFT saves p-tuning as what its prompt encoder has made, so that of either kind nothing is
left to compute. Digests are made here, once: a request with a soft prompt hashes nothing of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.messages import ModelInfo
from server.embeddings import EmbeddingError, Rows, decode_embedding
from server.errors import ModelNotFound, bounded
from server.file_tensor import RowLimits
from server.safetensors_file import is_safetensors

logger = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20

_KINDS = ("PROMPT_TUNING", "P_TUNING")
_REASONS = {
    "PREFIX_TUNING": "prefix tuning trains keys and values of every layer, not rows of the prompt",
    "MULTITASK_PROMPT_TUNING": "its rows depend on a task: save one task's rows as a safetensors file of one tensor",
    "CPT": "its rows depend on the training's projection: save the rows themselves as a safetensors file of one tensor",
}
"""Kinds of adapter that one might take for a soft prompt."""


class SoftPromptError(ValueError):
    """A soft prompt that cannot be served. The message is for the operator."""


@dataclass(frozen=True, slots=True)
class SoftPrompts:
    """All that this server has, by name."""

    rows: Mapping[str, Rows] = field(default_factory=dict)
    digest: str = ""
    """Of all names and rows; empty where there are none."""

    @classmethod
    def load(cls, given: Iterable[tuple[str, str]], model: ModelInfo) -> SoftPrompts:
        """`given`: names and paths. Raises SoftPromptError."""
        rows: dict[str, Rows] = {}
        state = hashlib.sha256()  # not of the rows' digests, which only a prefix cache asks for
        for name, path in given:
            if name in rows:
                raise SoftPromptError(f"soft prompt {name}: the name is given twice")
            try:
                rows[name] = _read(Path(path), model)
            except EmbeddingError as error:
                raise SoftPromptError(f"soft prompt {name}: {error}") from None
            except OSError as error:
                raise SoftPromptError(f"soft prompt {name}: cannot read {path}: {error.strerror}") from None
            state.update(name.encode() + b"\0" + hashlib.sha256(rows[name].data).digest())
            logger.info("soft prompt %s: %d rows", name, rows[name].num_rows)
        return cls(rows, state.hexdigest() if rows else "")

    def get(self, name: str, where: str) -> Rows:
        """Raises ModelNotFound. `where`: the field that the name came in."""
        if name not in self.rows:
            raise ModelNotFound(f"The soft prompt `{bounded(name, 100)}` does not exist.", param=where)
        return self.rows[name]


def _read(path: Path, model: ModelInfo) -> Rows:
    """Raises EmbeddingError, or OSError."""
    expected = None
    if path.is_dir():
        expected = _check_adapter(_adapter_config(path), model)
        if not (path / _WEIGHTS).exists() and (path / "adapter_model.bin").exists():
            raise EmbeddingError("adapter_model.bin is a pickle, which is never read: save the adapter as safetensors")
        path = path / _WEIGHTS
    # One row of the context is left for what comes behind it, or there would be nothing to ask.
    limits = RowLimits(model.hidden_size, model.max_model_len - 1)
    with path.open("rb") as file:
        payload = file.read(limits.max_payload_bytes + 1)  # the reader refuses what is longer
    if not is_safetensors(memoryview(payload)):
        raise EmbeddingError(f"{path.name} is not a safetensors file")
    rows = decode_embedding(payload, hidden_size=model.hidden_size, dtype=model.dtype, max_rows=limits.max_rows)
    if expected is not None and rows.num_rows != expected:
        raise EmbeddingError(f"{_CONFIG} says num_virtual_tokens {expected}, but there are {rows.num_rows} rows")
    return rows


def _adapter_config(folder: Path) -> dict[str, Any]:
    with (folder / _CONFIG).open("rb") as file:
        data = file.read(_MAX_CONFIG_BYTES + 1)
    try:
        config = json.loads(data) if len(data) <= _MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise EmbeddingError(f"{_CONFIG} is not a JSON object of at most {_MAX_CONFIG_BYTES} bytes")
    return config


def _check_adapter(config: Mapping[str, Any], model: ModelInfo) -> int:
    """The number of rows that it promises. Raises EmbeddingError for an adapter of another kind, or of another model as
    far as its configuration shows that."""
    kind = config.get("peft_type")
    if kind not in _KINDS:
        reason = _REASONS.get(kind, "it is no soft prompt") if isinstance(kind, str) else "it is no PEFT adapter"
        raise EmbeddingError(f"peft_type must be one of {', '.join(_KINDS)}; this one is {kind!r}: {reason}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise EmbeddingError(f"task_type must be CAUSAL_LM; this one is {config.get('task_type')!r}")
    own = _model_config(model)
    for theirs, ours in (
        ("token_dim", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_attention_heads", "num_attention_heads"),
    ):
        if None not in (config.get(theirs), own.get(ours)) and config[theirs] != own[ours]:
            raise EmbeddingError(
                f"it was trained for another model: its {theirs} is {config[theirs]}, this model's is {own[ours]}"
            )
    _compare_names(config.get("base_model_name_or_path"), model)
    rows = config.get("num_virtual_tokens")
    if type(rows) is not int or rows < 1:
        raise EmbeddingError("num_virtual_tokens must be a positive whole number")
    return rows


def _compare_names(trained_on: Any, model: ModelInfo) -> None:
    """Folders move and are renamed, so that another name proves nothing; but it is worth a line."""
    theirs = Path(str(trained_on or "")).name
    if theirs and theirs != Path(model.path).name:
        logger.warning("a soft prompt's adapter was trained on %s; this model's folder has another name", theirs)


def _model_config(model: ModelInfo) -> dict[str, Any]:
    """That of the language model, where it is a part of a larger one. Empty where there is none to be read."""
    try:
        config = json.loads((Path(model.path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config
