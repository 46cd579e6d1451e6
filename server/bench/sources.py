"""From the flags to a workload. Called by `command`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.bench.embeds_forms import MultipartEmbeds, StoredEmbeds
from server.bench.flags import UsageError
from server.bench.image_workload import RandomImages
from server.bench.interleaved import Interleaved
from server.bench.prompt_files import FileError, StoredPrompts, TraceEntry, TracePrompts, read_prompts, read_trace
from server.bench.workloads import Common, Mixed, RandomEmbeds, RandomIds, RandomText, Workload


@dataclass(frozen=True)
class Source:
    """Where requests come from."""

    make: Callable[[str, int], Workload]
    """The workload for a model's name and a number that is added to the seed."""
    available: int = 0
    """How many requests there are; 0: as many as one likes."""
    times: tuple[float, ...] | None = None
    """When they come, if the workload says: seconds from the start."""


def build_source(flags: argparse.Namespace) -> Source:
    """Raises UsageError where flags don't fit together, and for files that can't be used."""
    extra = _extra_body(flags.extra_body)
    for name, kinds in _ONLY_FOR.items():
        given = getattr(flags, name) not in (None, 0)
        if given and flags.workload not in kinds:
            raise UsageError(f"--{name.replace('_', '-')} is for --workload {' or '.join(kinds)}")
    for name in _NEEDED.get(flags.workload, ()):
        if getattr(flags, name) is None:
            raise UsageError(f"--workload {flags.workload} needs --{name}")
    if flags.prefix_len >= flags.input_len:
        raise UsageError("--prefix-len must be less than --input-len")
    if flags.embeds_as != "base64" and flags.workload not in ("embeds", "mixed"):
        raise UsageError("--embeds-as is for --workload embeds or mixed")
    if flags.embeds_as == "stored" and flags.input_len <= RandomEmbeds.OWN_ROWS:
        raise UsageError(f"--embeds-as stored needs an --input-len above {RandomEmbeds.OWN_ROWS}")

    if flags.workload == "interleaved" and flags.input_len < 3:
        raise UsageError("--workload interleaved needs an --input-len of 3 or more: ids, embeddings, ids")

    def common(model: str) -> Common:
        return Common(model, flags.output_len, flags.temperature, flags.ignore_eos, extra)

    try:
        if flags.workload == "jsonl":
            prompts = read_prompts(Path(flags.prompts), flags.num_requests)
            return Source(lambda model, _: StoredPrompts(common(model), prompts, flags.chat), len(prompts))
        if flags.workload == "trace":
            entries = read_trace(Path(flags.trace), flags.num_requests)
            times = TracePrompts(common(""), entries).times(flags.trace_speed)
            return Source(lambda model, _: _trace(flags, common(model), entries), len(entries), times)
    except FileError as error:
        raise UsageError(str(error)) from None
    return Source(lambda model, offset: _random(flags, common(model), flags.seed + offset))


_ONLY_FOR = {
    "prefix_len": ("ids", "mixed"),
    "hidden": ("embeds", "mixed", "interleaved"),
    "prompts": ("jsonl",),
    "trace": ("trace",),
}
_FORMS = {"base64": RandomEmbeds, "multipart": MultipartEmbeds, "stored": StoredEmbeds}
_NEEDED = {"jsonl": ("prompts",), "trace": ("trace",)}
ROW_FLAGS = {"ids": ("vocab_size",), "trace": ("vocab_size",), "embeds": ("hidden",), "mixed": ("vocab_size", "hidden"),
             "interleaved": ("vocab_size", "hidden")}  # fmt: skip
"""Flags about the model's rows, by the workloads that need them. They have values before a workload is made."""


def _trace(flags: argparse.Namespace, common: Common, entries: tuple[TraceEntry, ...]) -> Workload:
    # Not another seed for each round: what a trace shares with itself, it shares with its repetition.
    return TracePrompts(common, entries, flags.vocab_size, flags.seed)


def _random(flags: argparse.Namespace, common: Common, seed: int) -> Workload:
    ids = RandomIds(common, flags.input_len, flags.vocab_size, seed, flags.prefix_len, flags.num_prefixes)
    if flags.workload == "ids":
        return ids
    if flags.workload == "text":
        return RandomText(common, flags.input_len, seed, flags.chat)
    if flags.workload == "images":
        text = RandomText(common, flags.input_len, seed)
        return RandomImages(common, text, flags.images_per_request, flags.image_side, seed)
    if flags.workload == "interleaved":
        return _interleaved(flags, common, seed)
    embeds = _FORMS[flags.embeds_as](common, flags.input_len, flags.hidden, flags.embeds_dtype, flags.embeds_std, seed)
    if flags.workload == "embeds":
        return embeds
    return Mixed((embeds, ids), (flags.embeds_share, 1 - flags.embeds_share), seed)


def _interleaved(flags: argparse.Namespace, common: Common, seed: int) -> Workload:
    """The embeddings stand in the middle, with an id at least on either side."""
    rows = min(max(round(flags.input_len * flags.embeds_share), 1), flags.input_len - 2)
    before = (flags.input_len - rows) // 2
    after = flags.input_len - rows - before
    return Interleaved(common, rows, flags.hidden, flags.embeds_dtype, flags.embeds_std, seed,
                       ids_before=before, ids_after=after, vocab_size=flags.vocab_size)  # fmt: skip


def _extra_body(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body: {text[:80]!r} is not a JSON object")
    return extra
