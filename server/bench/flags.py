"""The flags of `intarsia bench serve`. Names are those of vLLM's `bench serve` where the meaning is the same."""

from __future__ import annotations

import argparse

from server.flag_types import integer, invalid, nonempty, real, seconds, with_default

MANY = 1 << 31
WORKLOADS = ("ids", "embeds", "text", "mixed", "interleaved", "images", "jsonl", "trace")
EMBEDS_FORMS = ("base64", "multipart", "stored")
LIMITS = ("ttft", "tpot", "itl", "e2el")
MAX_PROCS = 64
DEFAULT_VOCAB_SIZE = 32_000


class UsageError(Exception):
    """Flags that don't fit together. The message names them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("the server"))
    _add_workload(parser.add_argument_group("what is sent"))
    _add_load(parser.add_argument_group("how much of it, and when"))
    _add_results(parser.add_argument_group("results"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    url = "http://127.0.0.1:8000"
    add("--url", "--base-url", type=nonempty, default=url, metavar="URL", help=with_default("where it is", url))
    text = "measure this server too, in turn with the first, with the same requests"
    add("--compare", type=nonempty, metavar="URL", help=with_default(text, "none"))
    add("--model", type=nonempty, metavar="NAME", help="the model to ask for (default: the first that it lists)")
    text = "the model to ask the compared server for (default: the first that it lists)"
    add("--compare-model", type=nonempty, metavar="NAME", help=text)
    add("--api-key", type=nonempty, metavar="KEY", help=with_default("sent as a bearer token", "none"))
    text = "how long a request may take in all; then it counts as failed"
    add("--timeout", type=seconds, default=600.0, metavar="SECONDS", help=with_default(text, 600))


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = (
        "prompts: random token ids, random embeddings, random English words, ids and embeddings in turn, ids with"
        " embeddings among them, random images with words behind them (chat), those of a file (--prompts), or those of"
        " a recorded trace (--trace)"
    )
    add("--workload", choices=WORKLOADS, default="ids", help=with_default(text, "ids"))
    text = "rows of a random prompt"
    add("--input-len", type=integer(1, 1 << 24), default=512, metavar="ROWS", help=with_default(text, 512))
    text = "tokens to ask for, where a file doesn't say"
    add("--output-len", type=integer(1, 1 << 24), default=128, metavar="TOKENS", help=with_default(text, 128))
    text = f"random ids are between 3 and this (default: the server's, or {DEFAULT_VOCAB_SIZE} where it doesn't say)"
    add("--vocab-size", type=integer(4, 1 << 24), metavar="N", help=text)
    text = "how many of a random prompt's ids it shares with the others of its group"
    add("--prefix-len", type=integer(0, 1 << 24), default=0, metavar="ROWS", help=with_default(text, 0))
    text = "groups of prompts that share a prefix"
    add("--num-prefixes", type=integer(1, MANY), default=1, metavar="N", help=with_default(text, 1))
    text = "the model's hidden size, for embeddings (default: the server's; one that doesn't say it needs the flag)"
    add("--hidden", type=integer(1, 1 << 20), metavar="N", help=text)
    text = "type of the embeddings in the request"
    dtypes = ("bfloat16", "float16", "float32")
    add("--embeds-dtype", choices=dtypes, default="bfloat16", help=with_default(text, "bfloat16"))
    text = "standard deviation of random embeddings"
    add("--embeds-std", type=real(0.0, 1e3), default=0.02, metavar="STD", help=with_default(text, 0.02))
    text = (
        "how embeddings are sent: in the JSON, beside it, or by the id of a stored one (but for three rows); the latter"
        " two are this server's own"
    )
    add("--embeds-as", choices=EMBEDS_FORMS, default="base64", help=with_default(text, "base64"))
    text = "images of a request"
    add("--images-per-request", type=integer(1, 16), default=1, metavar="N", help=with_default(text, 1))
    text = "their width and height"
    add("--image-side", type=integer(8, 8192), default=512, metavar="PIXELS", help=with_default(text, 512))
    text = "the share of embeddings: of a mix's requests, of an interleaved prompt's rows"
    add("--embeds-share", type=real(0.0, 1.0), default=0.5, metavar="SHARE", help=with_default(text, 0.5))
    text = (
        "JSON lines or a JSON array; each entry has prompt (text or ids), messages, or ShareGPT's conversations, and"
        " may have output_len"
    )
    add("--prompts", type=nonempty, metavar="FILE", help=with_default(text, "none"))
    text = "JSON lines with timestamp (ms), input_length, output_length and perhaps hash_ids, as Mooncake's traces"
    add("--trace", type=nonempty, metavar="FILE", help=with_default(text, "none"))
    text = "replay the trace so many times as fast"
    add("--trace-speed", type=real(1e-3, 1e6), default=1.0, metavar="FACTOR", help=with_default(text, 1))
    text = "send texts to /v1/chat/completions"
    add("--chat", action="store_true", help=with_default(text, "off"))
    add("--temperature", type=real(0.0, 2.0), default=0.0, help=with_default("0 is greedy", 0))
    text = "go on behind an ending token, so that all answers are as long as asked"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=with_default(text, "on"))
    text = "more members of every request; they win"
    add("--extra-body", type=nonempty, default="{}", metavar="JSON", help=with_default(text, "{}"))
    text = "another seed sends other prompts at other times"
    add("--seed", type=integer(0, MANY), default=0, metavar="N", help=with_default(text, 0))


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "closed loop: requests in flight at any time; open loop: at most so many (no limit)"
    add("--concurrency", "--max-concurrency", type=integer(1, 100_000), metavar="C", help=with_default(text, 1))
    text = "one point after the other at these concurrencies"
    add("--sweep", type=nonempty, metavar="C,C,…", help=with_default(text, "none"))
    text = (
        "requests at each point (default: 4 times the concurrency, at least 16; in an open loop those of a minute; of"
        " a file, all)"
    )
    add("--num-requests", "--num-prompts", type=integer(1, MANY), metavar="N", help=text)
    text = "requests before them that don't count (default: the concurrency; in an open loop 1)"
    add("--warmup", "--num-warmups", type=integer(0, MANY), metavar="N", help=text)
    text = "open loop: requests a second, whether those before have been answered or not (default: closed loop)"
    add("--request-rate", type=real(1e-6, 1e6), metavar="RATE", help=text)
    text = "the rate rises or falls to this, linearly"
    add("--ramp-to", type=real(1e-6, 1e6), metavar="RATE", help=with_default(text, "it stays"))
    text = "gaps between requests: all the same, or random"
    add("--arrivals", choices=("constant", "poisson", "gamma"), help=with_default(text, "poisson"))
    text = "shape of gamma-distributed gaps: below 1 in bursts, 1 is poisson, above 1 more even"
    add("--burstiness", type=real(1e-3, 1e6), metavar="SHAPE", help=with_default(text, 1))
    text = "open loop: send for so long, instead of --num-requests"
    add("--duration", type=real(1e-3, 1e7), metavar="SECONDS", help=with_default(text, "none"))
    text = "how often each point is measured (default: once; with --compare three times)"
    add("--rounds", type=integer(1, 1000), metavar="N", help=text)
    text = "client processes (default: 1 up to 8 in flight, then up to 4)"
    add("--procs", type=integer(1, MAX_PROCS), metavar="N", help=text)


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = f"milliseconds that a good request may take: {', '.join(f'{name}:MS' for name in LIMITS)}"
    add("--goodput", nargs="+", action="extend", type=_limit, metavar="NAME:MS", help=with_default(text, "none"))
    add("--json", action="store_true", help=with_default("print one JSON line a point instead of tables", "off"))
    text = "write everything as JSON, with what is known of each request"
    add("--output", type=nonempty, metavar="FILE", help=with_default(text, "none"))
    text = "write a report with plots, one HTML file that needs no other"
    add("--html", type=nonempty, metavar="FILE", help=with_default(text, "none"))
    text = "show on stderr how far it is"
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help=with_default(text, "on"))
    add("--label", default="", metavar="TEXT", help=with_default("goes into the results", "none"))


def _limit(text: str) -> tuple[str, float]:
    """ "ttft:200" as ("ttft", 0.2)."""
    name, _, milliseconds = text.partition(":")
    if name not in LIMITS:
        invalid(f"{text!r} is not a limit such as {LIMITS[0]}:200; there are {', '.join(LIMITS)}")
    return name, real(1e-3, 1e9)(milliseconds) / 1e3
