"""The runner's configuration: built once from the command line by the server, passed on as JSON, never changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
LogFormatName = Literal["text", "json"]
AttentionBackendName = Literal["auto", "fa3", "sdpa", "triton"]


@dataclass(frozen=True)
class ClientLimits:
    """What one client (an API key of the server's) may have. None: as much as there is."""

    concurrency: int | None = None
    """Requests that wait or run."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Rows of prompts and tokens of answers."""


@dataclass(frozen=True)
class RunnerConfig:
    """None means that the runner chooses, by model and device (see `runner.limits`)."""

    address: str = ""
    """ZeroMQ endpoint of the PULL socket that the runner binds for its workers' messages."""
    model: str | None = None
    """A local Hugging Face folder or a hub id; None is the embedded default model."""
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    max_model_len: int | None = None
    """Rows of prompt and answer together."""
    max_num_seqs: int | None = None
    """Request slots."""
    max_num_batched_tokens: int | None = None
    """Rows computed in one step, at most."""
    chunked_prefill_size: int | None = None
    """Of these, prompt rows while other sequences decode, at most: the longer the step, the longer they wait. None: as
    they come, within what is measured at load (`runner.prompt_pace`); on a CPU a number of its own."""
    block_size: int = 16
    """Rows per KV block."""
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    load_format: LoadFormat = "auto"
    seed: int = 0
    """Seeds dummy weights; requests carry seeds of their own."""
    enforce_eager: bool = False
    """Never capture CUDA graphs."""
    async_scheduling: bool | None = None
    """None: on where the device runs beside the host (CUDA), off on the CPU, where there is nothing to overlap."""
    enable_prefix_caching: bool = True
    attention_backend: AttentionBackendName = "auto"
    trust_remote_code: bool = False
    max_queue: int = 1024
    """Choices that may wait for a slot, beside those that may run; one request more is rejected."""
    max_queued_tokens: int | None = None
    """Prompt rows of requests that wait for a slot, at most; one request more is rejected, unless it is alone."""
    clients: tuple[ClientLimits, ...] = (ClientLimits(),)
    """By the clients' numbers; at least one."""
    max_row_bytes: int = 4 << 30
    """Host memory for the prompt embeddings of unfinished requests, at most."""
    log_format: LogFormatName = "text"
    max_stored_bytes: int = 1 << 30
    """Host memory for stored embeddings, at most; 0: nothing is stored."""
    max_stored_bytes_per_key: int = 1 << 30
    """Of these, of one owner."""
    stored_seconds: float = 24 * 3600.0
    """How long a stored embedding is kept."""
    debug_checks: bool = False
    """Start from garbage instead of zeros and compare `is_token_ids` with the schedule on every step (slow)."""

    def to_json(self) -> str:
        return msgspec.json.encode(asdict(self)).decode()

    @staticmethod
    def from_json(text: str) -> RunnerConfig:
        return msgspec.json.decode(text, type=RunnerConfig)
