"""Every metric that /metrics exports, declared: name, kind, label, meaning. `metrics` counts and exports what stands
here, and docs/operations.md has the same table (a test compares the two).

Where vLLM measures the same thing, the name is vLLM's under our prefix; with --vllm-metrics it is exported under vLLM's
own prefix, too. The names are those of `vllm/v1/metrics/loggers.py` as of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runner.messages import STEP_ROWS_BOUNDS, STEP_SECONDS_BOUNDS, STEP_SEQUENCES_BOUNDS, HistogramCounts, Stats
from server.errors import ERROR_CODES

PREFIX = "intarsia:"
VLLM_PREFIX = "vllm:"

LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds. From 1 ms on: a small model's tokens are 2 ms apart."""
_TOKEN_BOUNDS = tuple(float(1 << power) for power in range(18))
_CHOICE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 100.0, 1000.0)

FINISHED = ("stop", "length", "abort", "error")
REJECTED = (
    *("queue_full", "tokens_full", "rows_full", "concurrency", "rate_limit", "invalid", "unavailable"),
    "not_found",
)
STATUSES = tuple(map(str, range(100, 600)))
"""A bounded set: the server chooses them all."""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Family:
    """One metric. A counter's samples have `_total` behind the name, a histogram's the usual three endings."""

    name: str
    kind: Kind
    text: str
    label: str = ""
    """Beside `model_name`."""
    values: tuple[str, ...] = ()
    """All that the label can be."""
    bounds: tuple[float, ...] = ()
    in_vllm: bool = False
    every_value: bool = False
    """Values of the label that have not been seen are exported as 0."""


@dataclass(frozen=True)
class EngineFamily(Family):
    """One that the runner measures: read off its last heartbeat."""

    read: Callable[[Stats], float | tuple[float, ...] | HistogramCounts] = lambda stats: 0.0
    """The value; one for each of `values`; or the buckets."""


def _kv_usage(stats: Stats) -> float:
    return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0


ENGINE_FAMILIES = (
    EngineFamily(
        "num_requests_running", "gauge", "Choices that hold a slot.", in_vllm=True, read=lambda stats: stats.running
    ),
    EngineFamily(
        "num_requests_waiting", "gauge", "Choices that wait for a slot.", in_vllm=True, read=lambda stats: stats.waiting
    ),
    EngineFamily(
        "num_tokens_waiting", "gauge", "Prompt rows of the choices that wait.", read=lambda stats: stats.waiting_rows
    ),
    EngineFamily("kv_cache_usage_perc", "gauge", "KV blocks in use, 0 to 1.", in_vllm=True, read=_kv_usage),
    EngineFamily("kv_cache_blocks_used", "gauge", "KV blocks in use.", read=lambda stats: stats.blocks_used),
    EngineFamily(
        "kv_cache_blocks_cached",
        "gauge",
        "KV blocks that are not in use and hold a cached prefix.",
        read=lambda stats: stats.blocks_cached,
    ),
    EngineFamily("kv_cache_blocks", "gauge", "KV blocks that there are.", read=lambda stats: stats.blocks_total),
    EngineFamily(
        "row_bytes",
        "gauge",
        "Host memory held by prompt embeddings of unfinished requests, bytes.",
        read=lambda stats: stats.row_bytes,
    ),
    EngineFamily(
        "stored_embeddings", "gauge", "Prompt embeddings that are kept.", read=lambda stats: stats.stored_embeddings
    ),
    EngineFamily(
        "stored_bytes",
        "gauge",
        "Host memory held by stored prompt embeddings, bytes.",
        read=lambda stats: stats.stored_bytes,
    ),
    EngineFamily(
        "num_preemptions",
        "counter",
        "Choices that lost their blocks and were recomputed.",
        in_vllm=True,
        read=lambda stats: stats.preemptions,
    ),
    EngineFamily(
        "prefix_cache_queries",
        "counter",
        "Prompt rows looked up in the prefix cache.",
        in_vllm=True,
        read=lambda stats: stats.prefix_queries,
    ),
    EngineFamily(
        "prefix_cache_hits",
        "counter",
        "Prompt rows found in the prefix cache.",
        in_vllm=True,
        read=lambda stats: stats.prefix_hits,
    ),
    EngineFamily(
        "computed_prompt_tokens",
        "counter",
        "Prompt rows computed: not those from the cache, but again those of preempted choices.",
        read=lambda stats: stats.prompt_tokens,
    ),
    EngineFamily(
        "engine_steps",
        "counter",
        "Steps, by whether their forward was a captured CUDA graph.",
        label="mode",
        values=("captured", "eager"),
        every_value=True,
        read=lambda stats: (float(stats.captured_steps), float(stats.steps - stats.captured_steps)),
    ),
    EngineFamily(
        "engine_step_seconds",
        "histogram",
        "The device's time for a step; their sum is the time in which it had work.",
        bounds=STEP_SECONDS_BOUNDS,
        read=lambda stats: stats.step_seconds,
    ),
    EngineFamily(
        "iteration_tokens_total",
        "histogram",
        "Rows of a step, prompt and decode together.",
        bounds=STEP_ROWS_BOUNDS,
        in_vllm=True,
        read=lambda stats: stats.step_rows,
    ),
    EngineFamily(
        "engine_step_sequences",
        "histogram",
        "Choices in a step: the batch's occupancy.",
        bounds=STEP_SEQUENCES_BOUNDS,
        read=lambda stats: stats.step_sequences,
    ),
)

PROMPT_TOKENS = Family("prompt_tokens", "counter", "Prompt rows of requests that got a slot.", in_vllm=True)
PROMPT_TOKENS_CACHED = Family(
    "prompt_tokens_cached", "counter", "Of prompt_tokens, those from the prefix cache.", in_vllm=True
)
GENERATION_TOKENS = Family("generation_tokens", "counter", "Tokens generated for a client.", in_vllm=True)
EMBEDDING_ROWS = Family("embedding_rows", "counter", "Prompt rows that came as embeddings, of accepted requests.")
EMBEDDING_BYTES = Family(
    "embedding_bytes", "counter", "Their size as the engine takes them, in the model's type, bytes."
)
REQUESTS_FINISHED = Family(
    "request_success",
    "counter",
    "Requests that ended, by how: the most serious end of their choices.",
    label="finished_reason",
    values=FINISHED,
    in_vllm=True,
    every_value=True,
)
REQUESTS_REJECTED = Family(
    "admission_rejections", "counter", "Requests that were not queued.", label="reason", values=REJECTED
)
HTTP_RESPONSES = Family(
    "http_responses",
    "counter",
    "HTTP responses; cut ones as 499 (by the client), 500 or 503. Probes and scrapes are not counted.",
    label="status",
    values=STATUSES,
)
ERRORS = Family(
    "errors",
    "counter",
    "Errors told to clients, by the code in them.",
    label="code",
    values=(*ERROR_CODES, "server_error", "other"),
)
TIME_TO_FIRST_TOKEN = Family(
    "time_to_first_token_seconds",
    "histogram",
    "From submission to a choice's first token.",
    bounds=LATENCY_BOUNDS,
    in_vllm=True,
)
INTER_TOKEN_LATENCY = Family(
    "inter_token_latency_seconds", "histogram", "Between a choice's tokens.", bounds=LATENCY_BOUNDS, in_vllm=True
)
E2E_LATENCY = Family(
    "e2e_request_latency_seconds",
    "histogram",
    "From submission to a request's end.",
    bounds=LATENCY_BOUNDS,
    in_vllm=True,
)
QUEUE_TIME = Family(
    "request_queue_time_seconds",
    "histogram",
    "From submission to a request's first slot, or to its end if it never got one.",
    bounds=LATENCY_BOUNDS,
    in_vllm=True,
)
PREFILL_TIME = Family(
    "request_prefill_time_seconds",
    "histogram",
    "From a request's first slot to its first token.",
    bounds=LATENCY_BOUNDS,
    in_vllm=True,
)
DECODE_TIME = Family(
    "request_decode_time_seconds",
    "histogram",
    "From a request's first token to its end.",
    bounds=LATENCY_BOUNDS,
    in_vllm=True,
)
INFERENCE_TIME = Family(
    "request_inference_time_seconds",
    "histogram",
    "From a request's first slot to its end.",
    bounds=LATENCY_BOUNDS,
    in_vllm=True,
)
REQUEST_PROMPT_TOKENS = Family(
    "request_prompt_tokens",
    "histogram",
    "Prompt rows of a request; 0 if it never got a slot.",
    bounds=_TOKEN_BOUNDS,
    in_vllm=True,
)
REQUEST_GENERATION_TOKENS = Family(
    "request_generation_tokens",
    "histogram",
    "Tokens generated for a request, over all of its choices.",
    bounds=_TOKEN_BOUNDS,
    in_vllm=True,
)
REQUEST_N = Family("request_params_n", "histogram", "Choices of a request.", bounds=_CHOICE_BOUNDS, in_vllm=True)
REQUEST_MAX_TOKENS = Family(
    "request_params_max_tokens",
    "histogram",
    "Tokens that each choice of a request may have.",
    bounds=_TOKEN_BOUNDS,
    in_vllm=True,
)
EMBEDDING_DECODE_TIME = Family(
    "embedding_decode_seconds",
    "histogram",
    "Decoding and checking of the embedding files of one HTTP request.",
    bounds=LATENCY_BOUNDS,
)
GRAMMAR_COMPILE_TIME = Family(
    "grammar_compile_seconds",
    "histogram",
    "Compiling of a grammar that is not remembered, the wait for a free process included.",
    bounds=LATENCY_BOUNDS,
)

SERVER_FAMILIES = (
    PROMPT_TOKENS,
    PROMPT_TOKENS_CACHED,
    GENERATION_TOKENS,
    EMBEDDING_ROWS,
    EMBEDDING_BYTES,
    REQUESTS_FINISHED,
    REQUESTS_REJECTED,
    HTTP_RESPONSES,
    ERRORS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_LATENCY,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    INFERENCE_TIME,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_N,
    REQUEST_MAX_TOKENS,
    EMBEDDING_DECODE_TIME,
    GRAMMAR_COMPILE_TIME,
)
"""What API processes count."""

CACHE_CONFIG = Family(
    "cache_config_info",
    "gauge",
    "Always 1: block_size, num_gpu_blocks, enable_prefix_caching, cache_dtype, max_num_seqs, max_model_len as labels.",
    in_vllm=True,
)

FAMILIES: tuple[Family, ...] = (*ENGINE_FAMILIES, *SERVER_FAMILIES, CACHE_CONFIG)
