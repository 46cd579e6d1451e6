"""`python -m runner.verify CONFIG_JSON`: does this very model say the same whatever way it is asked?

The same seeded prompts go in as token ids, as embeddings and as a mix of both, alone and in a crowd, through chunks,
overlap, preemption and cached prefixes; every answer is held against transformers' own `generate`. Started by
`intarsia verify`. The reference runs first and is let go before the engine loads: one copy of the weights at a time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal, TextIO

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from runner.attention.backend import AttentionBackend
from runner.config import RunnerConfig
from runner.default_model import DefaultModelError, default_model_path
from runner.device_step import MaskMismatch
from runner.engine import Engine
from runner.kv_cache import KVCache
from runner.limits import BadConfiguration, Limits, choose_device, choose_dtype
from runner.messages import DIGEST_BYTES, EMBEDDING_ID, Generate, SamplingParams, Span, StepOutput
from runner.model import Model, UnsupportedModel, max_positions, read_model_config
from runner.sequence import Request
from runner.trial import load_checked

LENGTHS = (24, 5, 17, 1, 37, 16, 31, 12)
"""Rows of the prompts: one, less than a block, whole blocks, more than three chunks."""
MAX_TOKENS = 32
MAX_MODEL_LEN = max(LENGTHS) + MAX_TOKENS
CHUNK = 12
"""The token budget where prompts are computed in chunks."""
ALTERNATIVES = 64
"""Of the reference's best tokens at each position, to see how far from a tie another answer is."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""In standard deviations of a position's logits (σ): where the reference prefers its own token by less, rounding
decides."""
SHOWN = 10
"""Wrong answers that are described after the table, at most."""

Say = Callable[..., None]
"""Writes a line."""
Kind = Literal["ids", "embeds", "mixed"]
KINDS: tuple[Kind, ...] = ("ids", "embeds", "mixed")
BATCHES = (1, len(LENGTHS))

EXIT_PASSED, EXIT_DIFFERS, EXIT_BAD_CONFIGURATION = 0, 1, 3


# --- the reference --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """A prompt and what transformers says to it."""

    ids: list[int]
    rows: Tensor
    """[len(ids), hidden], model dtype, host: what the model's input embedding makes of the ids."""
    tokens: list[int]
    best: list[dict[int, float]]
    """At each token: by how much the reference prefers its own to each of its best, in standard deviations."""

    def gap(self, position: int, token: int) -> float:
        return self.best[position].get(token, max(self.best[position].values()))

    def prompt(self, kind: Kind) -> list[list[int] | Tensor]:
        """In pieces: token ids, or rows."""
        if kind == "ids":
            return [self.ids]
        if kind == "embeds":
            return [self.rows]
        generator = random.Random(len(self.ids))  # noqa: S311 (not for secrets)
        cuts = sorted(generator.sample(range(1, len(self.ids)), min(3, len(self.ids) - 1)))
        bounds = list(itertools.pairwise([0, *cuts, len(self.ids)]))
        # The last piece is embeddings, so that a prompt of one row is, too.
        return [self.rows[a:b] if (len(bounds) - i) % 2 else self.ids[a:b] for i, (a, b) in enumerate(bounds)]


@torch.inference_mode()
def make_reference(config: RunnerConfig, path: str, device: torch.device, dtype: torch.dtype) -> list[Expected]:
    """Plain eager transformers, each prompt alone."""
    hf = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", trust_remote_code=config.trust_remote_code
    )
    hf.to(device).eval()
    # The model's own would be merged in: penalties, sampling, an end of its own.
    hf.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=MAX_TOKENS, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    table = hf.get_input_embeddings()
    generator = torch.Generator().manual_seed(config.seed)
    expected = []
    for length in LENGTHS:
        ids = torch.randint(table.weight.shape[0], (length,), generator=generator)
        device_ids = ids.to(device)[None]
        output = hf.generate(device_ids, attention_mask=torch.ones_like(device_ids))
        logits = torch.cat(output.logits).float().cpu()
        tokens: list[int] = output.sequences[0, length:].tolist()
        expected.append(Expected(ids.tolist(), table(device_ids)[0].cpu(), tokens, _preferences(logits, tokens)))
    return expected


def _preferences(logits: Tensor, tokens: list[int]) -> list[dict[int, float]]:
    """logits: [len(tokens), vocab] float32."""
    spread = logits.std(-1, keepdim=True).clamp(min=1e-6)
    best = logits.topk(min(ALTERNATIVES, logits.shape[1]))
    gaps = (logits.gather(1, torch.tensor(tokens)[:, None]) - best.values) / spread
    return [dict(zip(t, g, strict=True)) for t, g in zip(best.indices.tolist(), gaps.tolist(), strict=True)]


# --- the engine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    overlap: bool
    chunked: bool
    preempted: bool
    cached: bool


SETTINGS = [Setting(*values) for values in itertools.product((False, True), repeat=4) if sum(values) % 2 == 0]
"""Half of all: any three of the four meet in every combination. Nothing on and everything on are among them."""


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference."""

    length: int
    """Rows of the prompt."""
    position: int
    token: int
    right: int
    gap: float
    """By how much the reference prefers its own token, in σ."""

    def __str__(self) -> str:
        return (
            f"prompt of {self.length} rows: token {self.position} is {self.token} and not {self.right}, "
            f"which the reference prefers by {self.gap:.3g} σ"
        )


@dataclass
class Cell:
    """One batch of one kind under one setting."""

    answers: int = 0
    ties: list[Difference] = field(default_factory=list)
    """Where rounding decides."""
    wrong: list[Difference] = field(default_factory=list)
    mask: bool = False
    """`is_token_ids` differed from the schedule."""

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.mask

    def __str__(self) -> str:
        if self.mask:
            return "MASK"
        if self.wrong:
            return f"FAIL@{min(difference.position for difference in self.wrong)}"
        return f"tie@{min(difference.position for difference in self.ties)}" if self.ties else "ok"


class Bench:
    """An engine under one setting, in this process, and what came out of it."""

    def __init__(self, config: RunnerConfig, model: Model, backend: AttentionBackend, setting: Setting) -> None:
        slots = len(LENGTHS)
        per_seq = -(-MAX_MODEL_LEN // config.block_size)
        limits = Limits(MAX_MODEL_LEN, slots, CHUNK if setting.chunked else 8 * MAX_MODEL_LEN)
        # For preemption, just what one request needs at most; else all that the crowd does, once more for the cache.
        num_blocks = 1 + per_seq * (1 if setting.preempted else 2 * slots)
        cache = KVCache(model.kv_shapes, num_blocks, config.block_size, model.dtype, model.device)
        engine_config = replace(
            config, async_scheduling=setting.overlap, enable_prefix_caching=setting.cached, debug_checks=True
        )
        self.setting = setting
        self.engine = Engine(model, cache, backend, limits, engine_config, self._emit)
        self.tokens: dict[int, list[int]] = {}
        """By request number."""
        self._numbers = itertools.count()

    def _emit(self, worker: int, output: StepOutput) -> None:
        for request, token in zip(output.requests, output.tokens, strict=True):
            self.tokens[request].append(token)

    def check(self, expected: list[Expected], kind: Kind, batch: int) -> Cell:
        salt = f"{kind} {batch}"
        crowd = expected[:batch]
        tolerance = TOLERANCE[self.engine.model.dtype]
        cell = Cell()
        try:
            if self.setting.cached:
                for one in reversed(crowd):
                    self._ask(one, kind, salt, 1)
                    self._run()
            asked = [(one, self._ask(one, kind, salt)) for one in self._older(expected, batch) + crowd]
            self._run()
        except MaskMismatch:
            cell.mask = True
            return cell
        for one, number in asked:
            _compare(one, self.tokens.pop(number), tolerance, cell)
        return cell

    def _older(self, expected: list[Expected], batch: int) -> list[Expected]:
        """Alone, a request has all the blocks that it can ever want: where it is to be preempted, an older one takes
        them away."""
        return [max(expected, key=lambda one: len(one.ids))] if self.setting.preempted and batch == 1 else []

    def _ask(self, one: Expected, kind: Kind, salt: str, max_tokens: int = MAX_TOKENS) -> int:
        number = next(self._numbers)
        self.tokens[number] = []
        self.engine.add(_request(self.engine, number, one.prompt(kind), max_tokens, salt))
        return number

    def _run(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def _request(engine: Engine, number: int, pieces: list[list[int] | Tensor], max_tokens: int, salt: str) -> Request:
    ids: list[int] = []
    spans: list[Span] = []
    frames: list[memoryview] = []
    digests = b""
    for piece in pieces:
        if isinstance(piece, Tensor):
            data = piece.contiguous().view(torch.uint8).numpy()
            spans.append(Span(len(ids), len(piece)))
            frames.append(memoryview(data.tobytes()))
            digests += b"".join(blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in data)
            ids += [EMBEDDING_ID] * len(piece)
        else:
            ids += piece
    params = SamplingParams(max_tokens, temperature=0.0)
    packed = torch.tensor(ids, dtype=torch.int32).numpy()
    return Request.from_message(
        Generate(0, number, 1, params, tuple(spans), salt),
        [memoryview(packed.tobytes()), memoryview(digests), *frames],
        vocab_size=engine.model.vocab_size,
        row_size=engine.model.hidden_size * engine.model.dtype.itemsize,
        max_model_len=engine.limits.max_model_len,
        block_size=engine.config.block_size,
        private_cache=not engine.config.enable_prefix_caching,
    )


def _compare(one: Expected, tokens: list[int], tolerance: float, cell: Cell) -> None:
    """Only up to the first difference: what follows it is an answer to another question."""
    cell.answers += 1
    for position, (token, right) in enumerate(zip(tokens, one.tokens, strict=True)):
        if token != right:
            difference = Difference(len(one.ids), position, token, right, one.gap(position, token))
            (cell.ties if difference.gap < tolerance else cell.wrong).append(difference)
            return


# --- the table ------------------------------------------------------------------------------------------------------


def verify(config: RunnerConfig, out: TextIO) -> bool:
    """Runs every setting and writes a table, line by line; true if no answer differs.

    In float32 unless the configuration names a dtype. The context's length, the numbers of slots and blocks and the
    token budget are the matrix's own.

    Raises:
        UnsupportedModel, BadConfiguration, DefaultModelError: fit for the operator.
    """

    def say(text: str = "") -> None:
        print(text, file=out, flush=True)

    if config.load_format == "dummy":
        raise BadConfiguration("--load-format dummy: random weights have nothing to verify")
    config = replace(config, dtype="float32") if config.dtype == "auto" else config
    device = choose_device(config)
    path = config.model if config.model is not None else str(default_model_path(say))
    dtype = _check_configuration(config, path)
    say(f"{path}, {str(dtype).removeprefix('torch.')} on {device.type}: asking transformers")
    expected = make_reference(config, path, device, dtype)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    distinct = len({token for one in expected for token in one.tokens})
    say(f"{len(expected)} prompts of 1 to {max(LENGTHS)} rows, {MAX_TOKENS} tokens each ({distinct} different ones)")
    model, backend = load_checked(config, path, device, dtype, MAX_MODEL_LEN)

    say()
    say(_line(["overlap", "chunks", "preempted", "cached", *(f"{kind} ×{n}" for kind, n in _columns())]))
    cells = []
    for setting in SETTINGS:
        cells += _verify_setting(config, model, backend, setting, expected, say)
    return _summarise(cells, dtype, say)


def _check_configuration(config: RunnerConfig, path: str) -> torch.dtype:
    hf_config = read_model_config(config, path).get_text_config()
    if max_positions(hf_config) < MAX_MODEL_LEN:
        raise BadConfiguration(f"the model has {max_positions(hf_config)} positions; {MAX_MODEL_LEN} are needed")
    return choose_dtype(config, hf_config)


def _columns() -> Iterator[tuple[Kind, int]]:
    return itertools.product(KINDS, BATCHES)


def _line(fields: list[str]) -> str:
    return "  ".join(f"{text:<9}" for text in fields).rstrip()


def _verify_setting(
    config: RunnerConfig,
    model: Model,
    backend: AttentionBackend,
    setting: Setting,
    expected: list[Expected],
    say: Say,
) -> list[Cell]:
    """A row of the table."""
    bench = Bench(config, model, backend, setting)
    preemptions = hits = 0
    cells = []
    for kind, batch in _columns():
        cell = bench.check(expected, kind, batch)
        cells.append(cell)
        stats = bench.engine.stats()
        if cell.mask:
            # It stopped in the middle of a step.
            preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_hits
            bench = Bench(config, model, backend, setting)
    stats = bench.engine.stats()
    preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_hits
    say(
        _line(
            [
                "yes" if setting.overlap else "no",
                "yes" if setting.chunked else "no",
                f"{preemptions}×" if setting.preempted else "no",
                f"{hits} rows" if setting.cached else "no",
                *map(str, cells),
            ]
        )
    )
    return cells


def _summarise(cells: list[Cell], dtype: torch.dtype, say: Say) -> bool:
    ties = [difference for cell in cells for difference in cell.ties]
    wrong = [difference for cell in cells for difference in cell.wrong]
    answers, masks = sum(cell.answers for cell in cells), sum(cell.mask for cell in cells)
    say()
    if ties:
        largest = max(tie.gap for tie in ties)
        say("tie@n: the answer leaves the reference at token n, where rounding decides: the reference prefers its own")
        say(f"by less than {TOLERANCE[dtype]} σ (standard deviations of the logits); here by {largest:.2g} σ at most.")
    if wrong:
        say("FAIL@n: the answer leaves the reference at token n. Among them:")
        for difference in list(dict.fromkeys(wrong))[:SHOWN]:
            say(f"  {difference}")
    if masks:
        say("MASK: the device took a token for an embedding, or the other way round.")
    passed = not wrong and not masks
    equal = answers - len(ties) - len(wrong)
    say(f"{'PASSED' if passed else 'FAILED'}: {answers} answers, {equal} equal, {len(ties)} ties, {len(wrong)} wrong")
    return passed


def run_verify(config: RunnerConfig) -> int:
    """Prints the table; returns the exit status: 0 all alike, 1 something differs, 3 it can't be run."""
    try:
        return EXIT_PASSED if verify(config, sys.stdout) else EXIT_DIFFERS
    except (UnsupportedModel, BadConfiguration, DefaultModelError, torch.OutOfMemoryError) as error:
        print(f"intarsia: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION


def main() -> int:
    with contextlib.suppress(KeyboardInterrupt):
        return run_verify(RunnerConfig.from_json(sys.argv[1]))
    return 130


if __name__ == "__main__":
    sys.exit(main())
