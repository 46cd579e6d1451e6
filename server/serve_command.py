"""The flags of `intarsia serve`: names as vLLM's users know them where the meaning is the same, grouped, each with its
default in `--help`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from server.config import DEFAULT_MODEL_NAME, ServerConfig
from server.flag_types import api_key as _api_key
from server.flag_types import chat_template as _chat_template
from server.flag_types import fraction as _fraction
from server.flag_types import http_url as _http_url
from server.flag_types import integer as _integer
from server.flag_types import key_file as _key_file
from server.flag_types import named_path as _named_path
from server.flag_types import nonempty as _nonempty
from server.flag_types import origin as _origin
from server.flag_types import readable as _readable
from server.flag_types import seconds as _seconds
from server.flag_types import size as _size
from server.flag_types import timeout as _timeout
from server.flag_types import with_default as _with_default
from server.tracing import is_installed

EXIT_CONFIGURATION = 3
_DEFAULTS = ServerConfig()
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "mistral")
_LOG_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"a local Hugging Face folder or a hub id (default: {DEFAULT_MODEL_NAME}, which comes with the package)",
    )
    _add_http(parser.add_argument_group("HTTP"))
    _add_limits(parser.add_argument_group("limits and queue"))
    _add_presentation(parser.add_argument_group("what clients see of the model"))
    _add_model(parser.add_argument_group("loading the model"))
    _add_engine(parser.add_argument_group("memory and scheduling"))
    # vLLM wants it before it takes tools; here they need no leave.
    parser.add_argument(
        "--enable-auto-tool-choice", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    _add_refused(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped. Imports late: `intarsia --help` should not wait for FastAPI."""
    config = build_config(arguments)
    if config.otlp_traces_endpoint is not None and not is_installed():
        print("intarsia: --otlp-traces-endpoint needs OpenTelemetry: pip install 'intarsia[otel]'", file=sys.stderr)
        return EXIT_CONFIGURATION
    from server.serve import serve

    return serve(config)


def build_config(arguments: argparse.Namespace) -> ServerConfig:
    """The configuration that the flags make. Lists become tuples, absent flags the dataclass's defaults."""
    names = {each.name for each in fields(ServerConfig)}
    chosen: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        if name in names and value is not None:
            chosen[name] = tuple(value) if isinstance(value, list) else value
    if "ssl_certfile" not in chosen and (alone := sorted(name for name in chosen if name.startswith("ssl_"))):
        print(f"intarsia: --{alone[0].replace('_', '-')} needs --ssl-certfile", file=sys.stderr)
        raise SystemExit(2)
    config = ServerConfig(**chosen)
    if config.probe_port == config.port:
        print("intarsia: --probe-port and --port are the same", file=sys.stderr)
        raise SystemExit(2)
    return config


def _add_http(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default=_DEFAULTS.host, help=_with_default("address to listen on", _DEFAULTS.host))
    add("--port", type=_integer(0, 65535), default=_DEFAULTS.port, help=_with_default("port to listen on", 8000))
    add(
        "--probe-port",
        type=_integer(1, 65535),
        metavar="PORT",
        help="answer /livez, /readyz, /health and /ping there, too, in plain HTTP and without a client's certificate"
        " (default: only on --port)",
    )
    add(
        "--api-key",
        dest="api_keys",
        action="append",
        type=_api_key,
        metavar="KEY",
        help="let in only who sends this key, to every route but the probes; may be repeated (default: everybody)."
        " Behind a key, settings: 'KEY name=NAME concurrency=N requests=N tokens=N'",
    )
    add(
        "--api-key-file",
        dest="api_keys",
        action="extend",
        type=_key_file,
        metavar="FILE",
        help="the same for every line of this file: other users of the machine can read a command line, but not a file"
        " that is yours; a line may also be sha256: and a key's digest in hex (default: none)",
    )
    add(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        type=_origin,
        metavar="ORIGIN",
        help="let web pages from this origin (https://example.org) read answers; may be repeated (default: none)",
    )
    add(
        "--ssl-certfile", type=_readable, metavar="FILE", help="serve HTTPS with this certificate chain (default: HTTP)"
    )
    add("--ssl-keyfile", type=_readable, metavar="FILE", help="its private key (default: in the certificate's file)")
    add(
        "--ssl-keyfile-password-file",
        type=_readable,
        metavar="FILE",
        help="holds the private key's password (default: it has none)",
    )
    add(
        "--ssl-ca-certs",
        type=_readable,
        metavar="FILE",
        help="let in only clients that show a certificate of these authorities; probes too, but on --probe-port"
        " (default: everybody)",
    )
    add(
        "--max-body-bytes",
        type=_size(1),
        metavar="BYTES",
        help="largest request body (default: a full context of float32 embeddings in base64)",
    )
    add(
        "--max-json-bytes",
        type=_size(1),
        metavar="BYTES",
        help="largest JSON of a request without its embeddings and images (default: 8 MiB and 16 bytes a token of"
        " max-model-len)",
    )
    add(
        "--api-workers",
        type=_integer(1, 64),
        default=_DEFAULTS.api_workers,
        metavar="N",
        help=_with_default("processes that answer HTTP; more than one for many streams of a fast model", 1),
    )
    add(
        "--playground",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.playground,
        help=_with_default("a page at / for trying the server in a browser", "on"),
    )
    add(
        "--shutdown-timeout",
        type=_seconds,
        default=_DEFAULTS.shutdown_timeout,
        metavar="SECONDS",
        help=_with_default("after SIGTERM, how long running requests may take to finish", "30"),
    )
    add(
        "--log-level",
        choices=_LOG_LEVELS,
        default=_DEFAULTS.log_level,
        help=_with_default("how much is logged; prompts never are", "info"),
    )
    add(
        "--log-format",
        choices=("text", "json"),
        default=_DEFAULTS.log_format,
        help=_with_default("json: one object a line", "text"),
    )
    add(
        "--otlp-traces-endpoint",
        type=_http_url,
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector over OTLP/HTTP, for instance"
        " http://127.0.0.1:4318/v1/traces (default: none)",
    )
    add(
        "--vllm-metrics",
        action="store_true",
        help=_with_default("let /metrics have vLLM's names, too, for dashboards and scalers made for it", "off"),
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-queue",
        type=_integer(0, 1 << 31),
        default=_DEFAULTS.max_queue,
        metavar="N",
        help=_with_default("choices that may wait for a slot; one prompt more is answered 429", _DEFAULTS.max_queue),
    )
    add(
        "--max-queued-tokens",
        type=_size(1),
        metavar="ROWS",
        help="rows of the prompts that may wait, together; one prompt more is answered 429 (default: no bound)",
    )
    add(
        "--max-row-bytes",
        type=_size(0),
        default=_DEFAULTS.max_row_bytes,
        metavar="BYTES",
        help=_with_default(
            "host memory for the prompt embeddings of unfinished requests; more are answered 429", "4Gi"
        ),
    )
    add(
        "--max-stored-bytes",
        type=_size(0),
        default=_DEFAULTS.max_stored_bytes,
        metavar="BYTES",
        help=_with_default(
            "host memory for stored prompt embeddings, those used longest ago make room; 0 stores none", "1Gi"
        ),
    )
    add(
        "--max-stored-bytes-per-key",
        type=_size(1),
        metavar="BYTES",
        help="of these, what one API key may take (default: half of them; all with fewer than two keys)",
    )
    add(
        "--stored-embeddings-ttl",
        type=_seconds,
        default=_DEFAULTS.stored_embeddings_ttl,
        metavar="SECONDS",
        help=_with_default("how long a stored prompt embedding is kept", "a day"),
    )
    add(
        "--max-concurrency-per-key",
        type=_size(1),
        metavar="N",
        help="prompts of one API key that may wait or run at once, of everybody if there are no keys (default: no"
        " bound)",
    )
    add(
        "--requests-per-minute",
        type=_size(1),
        metavar="N",
        help="prompts, look-ups of input rows and uploads of one API key a minute (default: no bound)",
    )
    add(
        "--tokens-per-minute",
        type=_size(1),
        metavar="N",
        help="rows of prompts and of look-ups, and tokens of answers, of one API key a minute (default: no bound)",
    )
    add(
        "--queue-timeout",
        type=_timeout,
        metavar="SECONDS",
        help="how long a prompt may wait for its turn before it is answered 503 (default: no bound)",
    )
    add(
        "--request-timeout",
        type=_timeout,
        metavar="SECONDS",
        help="how long a request may take from its arrival to the end of its answer (default: no bound)",
    )


def _add_presentation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--served-model-name",
        nargs="+",
        action="extend",
        type=_nonempty,
        metavar="NAME",
        help="names by which clients may ask for the model; answers carry the first (default: MODEL, or the last part"
        " of its path)",
    )
    add(
        "--chat-template",
        type=_chat_template,
        metavar="FILE",
        help="Jinja template for chat messages, a file or the template itself (default: the model's own)",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_PARSERS,
        default=_DEFAULTS.tool_call_parser,
        help=_with_default("how the model writes tool calls; auto: as its chat template asks for", "auto"),
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=_DEFAULTS.reasoning_parser,
        help=_with_default("how the model marks its reasoning; auto: as its chat template shows", "auto"),
    )
    add(
        "--generation-config",
        default=_DEFAULTS.generation_config,
        metavar="{auto,none,FOLDER}",
        help=_with_default(
            "where sampling defaults come from: the model (auto), nowhere (none), or a folder's generation_config.json",
            "auto",
        ),
    )
    add(
        "--pooling",
        choices=("auto", "mean", "last"),
        default=_DEFAULTS.pooling,
        help=_with_default(
            "what /v1/embeddings takes of a text's hidden states where a request does not say; auto: what the model's"
            " folder says (1_Pooling/config.json), else the mean",
            "auto",
        ),
    )
    add(
        "--enable-prompt-embeds",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.enable_prompt_embeds,
        help=_with_default("accept prompts made of embeddings", "on"),
    )
    add(
        "--soft-prompt",
        dest="soft_prompts",
        action="append",
        type=_named_path,
        metavar="NAME=PATH",
        help="serve the model with these rows before every prompt as MODEL:NAME, and let parts of prompts name them; a"
        " PEFT adapter's folder (prompt tuning, p-tuning) or a safetensors file of one tensor; may be repeated"
        " (default: none)",
    )
    add(
        "--allowed-media-domains",
        nargs="+",
        action="extend",
        type=_nonempty,
        metavar="HOST",
        help="hosts from which images are fetched that a request names by an http(s) URL (default: none; data: URLs"
        " are always taken)",
    )
    add(
        "--strict-params",
        action="store_true",
        help=_with_default("refuse requests with parameters that nobody knows, instead of ignoring these", "off"),
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help=_with_default("let requests bring their own chat template; it can take as much memory as it likes", "off"),
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=_with_default("where to run", "auto"))
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help=_with_default("type of weights, cache and embeddings; auto: the model's own", "auto"),
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help=_with_default("dummy: random weights, for measuring", "auto"),
    )
    add("--seed", type=_integer(0, (1 << 63) - 1), default=0, help=_with_default("seed of dummy weights", 0))
    add(
        "--trust-remote-code",
        action="store_true",
        help=_with_default("run Python code that comes with the model", "off"),
    )
    add(
        "--attention-backend",
        choices=("auto", "fa3", "sdpa", "triton"),
        default="auto",
        help=_with_default(
            "auto: sdpa on the CPU, triton on CUDA; prompts by FlashAttention 3 (fa3) where that is installed, on"
            " Hopper GPUs in bfloat16 or float16",
            "auto",
        ),
    )
    add(
        "--enforce-eager",
        action="store_true",
        help=_with_default("never capture CUDA graphs", "off"),
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-model-len", type=_size(1), metavar="ROWS", help="rows of prompt and answer (default: the model's own)")
    add("--max-num-seqs", type=_size(1), metavar="N", help="choices that run at once (default: by model and device)")
    add(
        "--max-num-batched-tokens",
        type=_size(1),
        metavar="ROWS",
        help="rows computed in one step (default: by model and device)",
    )
    add(
        "--chunked-prefill-size",
        type=_size(1),
        metavar="ROWS",
        help="of these, prompt rows while others decode (default: as they come, up to 30 ms on a GPU; 64 on a CPU)",
    )
    add(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default=_DEFAULTS.scheduling_policy,
        help=_with_default(
            "fcfs: first come, first served; priority: requests may have one, and lower ones go first", "fcfs"
        ),
    )
    add(
        "--block-size",
        type=_integer(1, 1024),
        default=_DEFAULTS.block_size,
        metavar="ROWS",
        help=_with_default("rows in one block of the KV cache", _DEFAULTS.block_size),
    )
    add(
        "--gpu-memory-utilization",
        type=_fraction,
        default=_DEFAULTS.gpu_memory_utilization,
        metavar="FRACTION",
        help=_with_default("share of the GPU's memory to use in all", _DEFAULTS.gpu_memory_utilization),
    )
    add(
        "--kv-cache-memory-bytes",
        type=_size(1),
        metavar="BYTES",
        help="size of the KV cache; K, M and G are understood (default: what the utilization leaves; on the CPU,"
        " 512Mi, or less where all slots need less)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.enable_prefix_caching,
        help=_with_default("reuse the cache of equal prompt beginnings", "on"),
    )
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=_with_default("schedule a step while the one before it runs", "on with CUDA, off on the CPU"),
    )
    add(
        "--debug-checks",
        action="store_true",
        help=_with_default("check the engine's state on every step (slow)", "off"),
    )


# --- what vLLM has and we do not ------------------------------------------------------------------------------------


class _Refused(argparse.Action):
    """A flag that is known but not supported: better a clear word than "unrecognized arguments". `const` is the one
    value that asks for nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values != self.const:
            only = f" (only {self.const} is accepted)" if self.const else ""
            parser.error(f"{option} is not supported{only}: {self.metavar}")


def _add_refused(parser: argparse.ArgumentParser) -> None:
    one_device = "the model runs on one device"
    plain_types = "weights and KV cache are kept in the model's own type"
    no_adapters = "there are no adapters"
    for names, harmless, reason in (
        (("--tensor-parallel-size", "-tp"), "1", one_device),
        (("--pipeline-parallel-size", "-pp"), "1", one_device),
        (("--data-parallel-size", "-dp"), "1", one_device),
        (("--quantization", "-q"), None, plain_types),
        (("--kv-cache-dtype",), "auto", plain_types),
        (("--speculative-config",), None, "there is no speculative decoding"),
        (("--enable-lora",), None, no_adapters),
        (("--lora-modules",), None, no_adapters),
    ):
        parser.add_argument(
            *names,
            action=_Refused,
            const=harmless,
            metavar=reason,
            nargs="*" if "lora" in names[0] else None,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
