"""The API server's configuration: one frozen dataclass, built once from the command line by `server.cli`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.config import ClientLimits, RunnerConfig
from server.api_keys import ApiKey, limits_of, parse_keys
from server.tls import CertificateFiles

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""What the embedded default model is called in the API when no other name is given."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
AttentionBackend = Literal["auto", "fa3", "sdpa", "triton"]

LogFormat = Literal["text", "json"]

_MIB = 1 << 20


@dataclass(frozen=True)
class ServerConfig:
    """Everything that `intarsia serve` can be told. Field names are the flags'."""

    model: str | None = None
    """A local folder or a hub id; None is the embedded default model."""

    # Where it listens and whom it lets in.
    host: str = "127.0.0.1"
    port: int = 8000
    probe_port: int | None = None
    """Where probes are answered in plain HTTP as well; None: only where everything is."""
    api_keys: tuple[str, ...] = ()
    """Each with its settings behind it (`api_keys.parse_key`). Empty: everybody may use every route."""
    cors_origins: tuple[str, ...] = ()
    """Whose web pages may read answers."""
    ssl_certfile: str | None = None
    """None: plain HTTP."""
    ssl_keyfile: str | None = None
    ssl_keyfile_password_file: str | None = None
    ssl_ca_certs: str | None = None
    """None: clients need no certificates."""
    max_body_bytes: int | None = None
    """None: follows from the model, see `body_limit_for`."""
    max_json_bytes: int | None = None
    """None: follows from the model, see `json_limit_for`."""
    api_workers: int = 1
    """Processes that answer HTTP."""
    playground: bool = True
    """The page at /."""
    shutdown_timeout: float = 30.0
    request_timeout: float | None = None
    """Seconds from a request's arrival to the end of its answer; None: as long as it takes."""
    queue_timeout: float | None = None
    """Seconds for which a prompt may wait for its first slot."""
    max_concurrency_per_key: int | None = None
    """For each API key, or for everybody together without any; so are the next two."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None
    """A collector's URL; None: no traces."""
    vllm_metrics: bool = False
    """/metrics also has what vLLM measures under vLLM's names."""

    # How the model is presented.
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    """A file, or the template itself; None is the model's own."""
    tool_call_parser: str = "auto"
    """"auto": what the chat template asks for; "none": calls are content; else one of `server.tools.styles`."""
    reasoning_parser: str = "auto"
    """The same, of `server.reasoning.styles`."""
    generation_config: str = "auto"
    """"auto": the model's own sampling defaults; "none": neutral ones; else a folder with a generation_config.json."""
    pooling: str = "auto"
    """Of /v1/embeddings: "auto" is what the model's folder says, else the mean; or "mean", "last"."""
    enable_prompt_embeds: bool = True
    soft_prompts: tuple[tuple[str, str], ...] = ()
    """(name, path) each."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images are fetched, where a request names them by URL; empty: none."""
    strict_params: bool = False
    trust_request_chat_template: bool = False
    scheduling_policy: SchedulingPolicy = "fcfs"

    # How it is run.
    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_queue: int = 1024
    max_queued_tokens: int | None = None
    """Prompt rows of requests that wait for a slot; None: as many as `max_queue` allows."""
    max_row_bytes: int = 4096 * _MIB
    """Prompt embeddings that the runner holds for unfinished requests, bytes of host memory."""
    max_stored_bytes: int = 1024 * _MIB
    """Stored prompt embeddings, bytes of the runner's host memory; 0: none are stored."""
    max_stored_bytes_per_key: int | None = None
    """Of one API key; None: half of them, or all where there is no second key."""
    stored_embeddings_ttl: float = 24 * 3600.0
    """Seconds that a stored embedding is kept."""
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    """None: on where it pays."""
    enforce_eager: bool = False
    attention_backend: AttentionBackend = "auto"
    debug_checks: bool = False

    # Not flags: what tests turn.
    runner_command: tuple[str, ...] = (sys.executable, "-P", "-m", "runner")
    """`-P`: a folder called `runner` where the user happens to stand must not be run instead."""
    ready_seconds: float = 10.0
    """A heartbeat older than this makes /readyz fail."""
    live_seconds: float = 60.0
    """A heartbeat older than this makes /livez fail."""
    silent_seconds: float = 60.0
    """A client that is not there any more is noticed after so long; one that does not read, after twice that."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which a client may ask for the model; the first is the one in answers."""
        return self.served_model_name or (DEFAULT_MODEL_NAME if self.model is None else _public_name(self.model),)

    @property
    def stores_prompt_embeds(self) -> bool:
        return self.enable_prompt_embeds and self.max_stored_bytes > 0

    @property
    def _max_stored_bytes_per_key(self) -> int:
        if self.max_stored_bytes_per_key is not None:
            return self.max_stored_bytes_per_key
        return self.max_stored_bytes // 2 if len(self.api_keys) > 1 else self.max_stored_bytes

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """`api_keys`, parsed."""
        return parse_keys(self.api_keys)

    @property
    def key_limits(self) -> tuple[ClientLimits, ...]:
        """Each API key's; one for everybody where there are no keys."""
        default = ClientLimits(self.max_concurrency_per_key, self.requests_per_minute, self.tokens_per_minute)
        return limits_of(self.keys, default)

    @property
    def certificate_files(self) -> CertificateFiles | None:
        """None: plain HTTP."""
        if self.ssl_certfile is None:
            return None
        key, password = self.ssl_keyfile or "", self.ssl_keyfile_password_file or ""
        return CertificateFiles(self.ssl_certfile, key, password, self.ssl_ca_certs or "")

    def runner_config(self, address: str) -> RunnerConfig:
        """What the runner is started with; `address` is where it binds its socket."""
        return RunnerConfig(
            model=self.model,
            address=address,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunked_prefill_size=self.chunked_prefill_size,
            block_size=self.block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            load_format=self.load_format,
            seed=self.seed,
            enforce_eager=self.enforce_eager,
            async_scheduling=self.async_scheduling,
            enable_prefix_caching=self.enable_prefix_caching,
            attention_backend=self.attention_backend,
            trust_remote_code=self.trust_remote_code,
            log_format=self.log_format,
            max_queue=self.max_queue,
            max_queued_tokens=self.max_queued_tokens,
            clients=self.key_limits,
            max_row_bytes=self.max_row_bytes,
            max_stored_bytes=self.max_stored_bytes,
            max_stored_bytes_per_key=self._max_stored_bytes_per_key,
            stored_seconds=self.stored_embeddings_ttl,
            debug_checks=self.debug_checks,
        )

    def body_limit_for(self, max_model_len: int, hidden_size: int, *, sees: bool = False) -> int:
        """The largest request body, bytes: a full context of float32 rows in base64, and room for the rest. `sees`: the
        model takes images, so that there is room for two of the largest at least."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        rows = max_model_len * hidden_size * 4 * 4 // 3
        return (max(rows, 56 * _MIB) if sees else rows) + 4 * _MIB

    def json_limit_for(self, max_model_len: int) -> int:
        """The largest JSON of a request without its embeddings and images, bytes: room for texts and ids of a full
        context, and of many short prompts. While it is parsed the process does nothing else: up to 4 ms a MiB of text,
        17 of token ids."""
        return self.max_json_bytes or 8 * _MIB + 16 * max_model_len


def _public_name(model: str) -> str:
    """A hub id is its own name; of a local folder only the last part, for clients have no business with the rest."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
