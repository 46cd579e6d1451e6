"""The engine: requests in, steps launched one ahead of the results, tokens out.

One per runner, driven by `runner.__main__`'s loop (and by tests, without a process). It owns the scheduler and the
device and turns what retires into messages; where messages come from and go to is `runner.endpoint`'s business.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from runner.attention.backend import AttentionBackend
from runner.config import RunnerConfig
from runner.default_model import default_model_path
from runner.device_step import DeviceStep, Launched, max_admitted_rows
from runner.grammar import FAILED, GrammarExecutor, MaskRow, Outcome
from runner.hidden import PIECE_BYTES, pieces
from runner.image_encoder import ImageEncoder
from runner.kv_cache import KVCache, bytes_per_block
from runner.limits import BadConfiguration, Limits, choose_device, choose_dtype, choose_limits, choose_num_blocks
from runner.messages import (
    EMBEDDING_ID,
    End,
    ModelInfo,
    PromptLogprobs,
    Started,
    Stats,
    StepOutput,
    TokenLogprobs,
    VisionInfo,
)
from runner.model import Model, max_positions, read_model_config
from runner.outbox import Addresses, Outbox
from runner.prompt_pace import PromptPace
from runner.sampler import Logprobs
from runner.scheduler import Ended, Scheduler
from runner.sequence import Key, Request, Sequence
from runner.step import Step
from runner.step_stats import StepStats
from runner.trial import load_checked, measure
from runner.vision import MAX_ROWS

log = logging.getLogger(__name__)

GIB = 1 << 30
Emit = Callable[[int, StepOutput], None]
"""(worker, what a step produced for it)"""


@dataclass
class _Counters:
    prompt_tokens: int = 0
    generated_tokens: int = 0
    accepted_row_bytes: int = 0


class Engine:
    def __init__(self, model: Model, cache: KVCache, backend: AttentionBackend, limits: Limits, config: RunnerConfig,
                 emit: Emit, *, chunked_prefill_size: int | None = None) -> None:  # fmt: skip
        """`chunked_prefill_size`: the default where the configuration leaves it open."""
        self.model, self.limits, self.config = model, limits, config
        self.scheduler = Scheduler(
            num_slots=limits.max_num_seqs,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_admitted_rows=max_admitted_rows(limits.max_model_len, limits.max_num_batched_tokens),
            chunked_prefill_size=config.chunked_prefill_size or chunked_prefill_size,
            num_clients=len(config.clients),
        )
        self.device = DeviceStep(
            model,
            cache,
            backend,
            num_slots=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            debug_checks=config.debug_checks,
        )
        self.info = ModelInfo(
            path=model.path,
            model_type=str(model.config.model_type),
            dtype=model.dtype_name,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            max_model_len=limits.max_model_len,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            vision=vision_info(model, limits),
            embedding_scale=model.embedding_scale,
        )
        self._images = None if model.vision is None else ImageEncoder(model.vision, self.device.stream)
        overlap = config.async_scheduling
        self._depth = 1 if (model.device.type == "cuda" if overlap is None else overlap) else 0
        self._launched: deque[Launched] = deque()
        self._scheduled: Step | None = None
        """While it is being launched."""
        self._addresses: tuple[int, Addresses | None] = 0, None
        """Of the step that was retired last, and its `members`."""
        self._grammars = GrammarExecutor()
        self._emit = emit
        self._counters = _Counters()
        self._step_stats = StepStats()
        self.released_row_bytes = 0
        """Of prompt embeddings, since start. Only grows, and only on the engine's thread."""
        self.waited_seconds = 0.0
        """For the device, since start."""

    @staticmethod
    def load(config: RunnerConfig, emit: Emit, progress: Callable[[str], None] = lambda stage: None) -> Engine:
        """Loads the model and sizes everything to the device.

        Raises:
            UnsupportedModel, BadConfiguration, DefaultModelError: fit for the operator.
        """
        device = choose_device(config)
        path = config.model if config.model is not None else str(default_model_path(progress))
        progress(f"loading {path}")
        hf_config = read_model_config(config, path)
        text_config = hf_config.get_text_config()
        limits = choose_limits(config, max_positions(text_config), device)
        dtype = choose_dtype(config, text_config)
        if device.type == "cpu":
            from runner.kernels.cpu import can_compile, compile_kernels

            if not can_compile(dtype):
                raise BadConfiguration("this processor can't convert float16: use --dtype bfloat16 or float32")
            compile_kernels(dtype, progress)
        progress(f"loading the weights of {path}")
        model, backend = load_checked(config, path, device, dtype, limits.max_model_len)
        weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        progress("sizing the KV cache")
        captured = device.type == "cuda" and backend.capturable and not config.enforce_eager
        largest = measure(model, backend, limits, config.block_size, captured=captured)
        num_blocks = choose_num_blocks(config, model, limits, largest.reserve)
        cache = KVCache(model.kv_shapes, num_blocks, config.block_size, model.dtype, device)
        engine = Engine(model, cache, backend, limits, config, emit, chunked_prefill_size=largest.chunk)
        if captured:
            engine.device.capture(progress)
            engine.scheduler.padded_sizes = engine.device.padded_sizes
            if config.chunked_prefill_size is None:
                engine.scheduler.pace = PromptPace(largest.chunk, engine.device.cheapest_prompt_rows())
        pace = engine.scheduler.pace
        log.info("prompt rows of a step in which others decode: %d to %d", pace.least, pace.most)
        if device.type == "cuda":
            _log_memory(device, weights, num_blocks * bytes_per_block(model.kv_shapes, config.block_size, model.dtype))
        return engine

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._counters.accepted_row_bytes += request.row_bytes
        if request.images and self._images is not None:
            self._images.add(request)
        else:
            self.scheduler.add(request)

    def refuse(self, request: Request) -> None:
        """Gives back what the endpoint has counted for a request that is not to run after all."""
        self._counters.accepted_row_bytes += request.row_bytes
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.released_row_bytes += request.row_bytes
        request.on_release()
        self.scheduler.refuse(request)

    def abort(self, key: Key, choice: int = -1) -> None:
        if self._images is not None and (waiting := self._images.get(key)) is not None:
            waiting.unwanted |= set(range(waiting.n)) if choice == -1 else {choice}
            if len(waiting.unwanted) == waiting.n:
                self._images.remove(waiting)
                self._forget(waiting)
            return
        sequences = self.scheduler.requests.get(key)
        if sequences:
            request = sequences[0].request
            self.scheduler.abort(key, choice)
            self._release_rows(request)

    def abort_worker(self, worker: int) -> None:
        """Aborts everything that came from a worker."""
        waiting = [] if self._images is None else self._images.keys
        for key in [key for key in [*self.scheduler.requests, *waiting] if key[0] == worker]:
            self.abort(key)

    def _release_rows(self, request: Request) -> None:
        if request.key not in self.scheduler.requests:
            self.released_row_bytes += request.row_bytes
            request.on_release()

    @property
    def ended_sequences(self) -> int:
        """Since start. Only grows, and only on the engine's thread."""
        return self.scheduler.ended_sequences

    @property
    def unqueued_rows(self) -> int:
        """Prompt rows of requests that have had a slot or ended. As `ended_sequences`."""
        return self.scheduler.unqueued_rows

    @property
    def ended_requests(self) -> list[int]:
        """By client. As `ended_sequences`."""
        return self.scheduler.ended_requests

    @property
    def generated_tokens(self) -> list[int]:
        """By client, of sequences that have ended. As `ended_sequences`."""
        return self.scheduler.generated_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._images)

    def stats(self) -> Stats:
        scheduler, counters, steps = self.scheduler, self._counters, self._step_stats
        return Stats(
            running=scheduler.num_running,
            waiting=len(scheduler.waiting) + (0 if self._images is None else self._images.num_sequences),
            blocks_used=scheduler.pool.num_used,
            blocks_total=scheduler.pool.num_blocks - 1,
            blocks_cached=scheduler.pool.num_cached,
            steps=steps.steps,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            row_bytes=counters.accepted_row_bytes - self.released_row_bytes,
            captured_steps=steps.captured,
            step_seconds=steps.seconds.snapshot(),
            step_rows=steps.rows.snapshot(),
            step_sequences=steps.sequences.snapshot(),
            waiting_rows=scheduler.waiting.rows,
        )

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launches the next step, then takes in the results of the one before it.

        time ──►  host    schedule N+1 · launch N+1 · wait N · retire N · schedule N+2 · …
                  device  ─────── N ──────────┤──────────── N+1 ─────────────┤──── N+2 …

        A grammar has to know step N's token before N+1 can be sampled. Then N is retired between the halves of N+1,
        while N+1's forward runs, and only sampling waits.
        """
        try:
            self._step()
        except RuntimeError as error:
            # What the device reports may be an earlier step's fault: all that are on their way are named.
            for launched in self._launched:
                error.add_note(f"a step in flight: {_size(launched.step)}")
            if self._scheduled is not None:
                error.add_note(f"the step that was being launched: {_size(self._scheduled)}")
            raise

    def _step(self) -> None:
        if self._images:
            for request in self._images.advance():
                self.scheduler.add(request)
                for choice in request.unwanted:
                    self.scheduler.abort(request.key, choice)
        step = self._scheduled = self.scheduler.schedule()
        if step is not None:
            self._step_stats.launched()
            launched = self.device.launch_forward(step)
            self._launched.append(launched)
            self._scheduled = None
            if np.count_nonzero(step.asking):
                asking = step.asking.nonzero()[0].tolist()
                constrained = [entry for entry in asking if step.sequences[entry].matcher is not None]
                if constrained:
                    self._constrain(launched, constrained)
            self.device.launch_sampling(launched)
        # Nothing launched: the scheduler may be waiting for what is in flight.
        if self._launched and (step is None or len(self._launched) > self._depth):
            self._retire_first()

    def _constrain(self, launched: Launched, entries: list[int]) -> None:
        """Stages the masks of a step's constrained entries, once their matchers are up to date."""
        sequences = launched.step.sequences
        theirs = set(launched.step.slots[entries].tolist())
        earlier = [each.step for each in self._launched if each is not launched]
        if any(not theirs.isdisjoint(step.slots.tolist()) for step in earlier):
            while self._launched[0] is not launched:
                self._retire_first()
        entries = [entry for entry in entries if not sequences[entry].ended]
        if not entries:
            return
        rows = [self._mask_row(launched.step, entry) for entry in entries]
        masks = self.device.stage_masks(launched, entries, rows[0].matcher.mask_words)
        outcomes = self._grammars.fill(rows, masks)
        launched.ends = [(sequences[e], end) for e, end in zip(entries, outcomes, strict=True) if end is not None]

    @staticmethod
    def _mask_row(step: Step, entry: int) -> MaskRow:
        sequence = step.sequences[entry]
        assert sequence.matcher is not None  # noqa: S101 - the caller has looked
        params = sequence.request.sampling
        made = int(step.positions[entry]) - sequence.request.answer_start
        return MaskRow(sequence.matcher, sequence.request.possible_stop_ids, made < params.min_tokens)

    def _retire_first(self) -> None:
        self._retire(self._launched[0])
        self._launched.popleft()

    def _retire(self, launched: Launched) -> None:
        started = time.perf_counter()
        launched.done.wait()
        self.waited_seconds += time.perf_counter() - started
        step, outbox = launched.step, Outbox()
        self._add_started(step, outbox)
        self._add_prompt_logprobs(launched, outbox)
        tokens = launched.staging.sampled[: step.num_entries].copy()
        addresses = self._addresses_of(step)
        # Before the step is accounted for: the tokens that it sampled for these don't count.
        complete = self._end_by_grammar(launched.ends)
        self._add_hidden(launched, complete, outbox)
        self._keep_latents(launched)
        entries, ended = self.scheduler.retire(step, tokens)
        followed = self._end_by_grammar(self._follow(step, entries, tokens))
        ended += complete + followed
        self._count(launched, len(entries))
        strayed = {end.sequence for end in followed if end.reason == "error"}
        if strayed:  # by a token that may be none of the grammar's: nobody is told of it
            entries = entries[[step.sequences[entry] not in strayed for entry in entries.tolist()]]
        outbox.add_tokens(addresses.of(entries), tokens, self._logprobs_by_entry(launched))
        for end in ended:
            out = outbox.of(end.sequence.request.key[0])
            out.ends.append(_end_message(end))
            if end.reason != "error":
                out.hidden.extend(end.sequence.kept_hidden.messages(end.sequence.request, end.sequence.choice))
        # Once a request: siblings often end in the same step.
        for request in {end.sequence.request for end in ended}:
            self._release_rows(request)
        outbox.send(self._emit)

    def _addresses_of(self, step: Step) -> Addresses:
        """While the same sequences go on, the same."""
        members, addresses = self._addresses
        if addresses is None or not step.members or step.members != members:
            addresses = Addresses(self.scheduler.table, step.slots)
            self._addresses = step.members, addresses
        return addresses

    def _follow(
        self, step: Step, entries: NDArray[np.intp], tokens: NDArray[np.int64]
    ) -> list[tuple[Sequence, Outcome]]:
        """Moves the matchers on by the tokens that a step made. (Those that ended with theirs need it no more.)"""
        moving, matched = [], []
        if not np.count_nonzero(step.asking):
            return []
        for entry in entries[step.asking[entries]].tolist():
            sequence = step.sequences[entry]
            if sequence.matcher is not None and not sequence.ended:
                moving.append(sequence)
                matched.append((sequence.matcher, int(tokens[entry])))
        if not moving:
            return []
        return [(s, end) for s, end in zip(moving, self._grammars.consume(matched), strict=True) if end]

    def _end_by_grammar(self, ends: list[tuple[Sequence, Outcome]]) -> list[Ended]:
        ended = []
        for sequence, outcome in ends:
            if not sequence.ended:
                self.scheduler.end(sequence)
                ended.append(Ended(sequence, outcome, message=FAILED if outcome == "error" else ""))
        return ended

    @staticmethod
    def _add_started(step: Step, outbox: Outbox) -> None:
        for admission in step.admissions:
            sequence = admission.sequence
            if not sequence.started and not sequence.ended:
                sequence.started = True
                request = sequence.request
                cached = min(admission.computed, request.prompt_len)
                waited = admission.at - request.arrived
                worker, number = request.key
                outbox.of(worker).started.append(Started(number, sequence.choice, cached, waited))

    @staticmethod
    def _add_prompt_logprobs(launched: Launched, outbox: Outbox) -> None:
        for score, targets, logprobs in launched.prompt_logprobs:
            sequence = launched.step.sequences[score.entry]
            if not sequence.ended:
                ids: list[int] = targets.tolist()
                rows = zip(ids, _token_logprobs(ids, logprobs, score.top), strict=True)
                entries = tuple(None if token <= EMBEDDING_ID else row for token, row in rows)
                worker, number = sequence.request.key
                outbox.of(worker).prompt_logprobs.append(PromptLogprobs(number, score.start, entries))

    def _add_hidden(self, launched: Launched, complete: list[Ended], outbox: Outbox) -> None:
        """`complete`: sequences that end before the token which this step has sampled for them."""
        if launched.hidden is None:
            return
        ended_now = {end.sequence for end in complete}
        for run, rows in launched.hidden.by_run(launched.step.hidden_runs):
            sequence = launched.step.sequences[run.entry]
            request, count = sequence.request, run.end - run.start
            if sequence.ended:  # no token is chosen from these, but a prompt's are wanted all the same
                count = min(run.end, request.answer_start) - run.start if sequence in ended_now else 0
            if count <= 0 or sequence.kept_hidden.takes(request.sampling, run, rows, count):
                continue
            worker, data = request.key[0], rows[:count]
            if data.nbytes <= PIECE_BYTES:
                outbox.of(worker).hidden.extend(pieces(request.key[1], sequence.choice, run.start, data))
                continue
            for piece in pieces(request.key[1], sequence.choice, run.start, data):
                self._emit(worker, StepOutput([], [], [], hidden=[piece]))

    @staticmethod
    def _keep_latents(launched: Launched) -> None:
        """A preempted sequence is given its latent rows again, like a prompt's embeddings."""
        if launched.latents is None:
            return
        rows = launched.latents.view(torch.uint8).numpy()
        for entry, row in zip(launched.step.latent_outputs.tolist(), rows, strict=True):
            launched.step.sequences[entry].latents.append(row.copy())

    def _count(self, launched: Launched, sampled: int) -> None:
        self._step_stats.retired(launched.step, captured=launched.captured)
        self._counters.generated_tokens += sampled
        self._counters.prompt_tokens += launched.step.prompt_rows

    @staticmethod
    def _logprobs_by_entry(launched: Launched) -> dict[int, TokenLogprobs]:
        if launched.logprobs is None:
            return {}
        entries = launched.logprob_entries
        tokens = launched.tokens[entries].tolist()
        result = {}
        for entry, row in zip(entries, _token_logprobs(tokens, launched.logprobs, None), strict=True):
            top = launched.step.sequences[entry].request.sampling.logprobs or 0
            result[entry] = TokenLogprobs(
                row.token, row.logprob, row.rank, row.top_tokens[:top], row.top_logprobs[:top]
            )
        return result


def vision_info(model: Model, limits: Limits) -> VisionInfo | None:
    """What workers must know to take images. Raises `BadConfiguration` where no step can hold one."""
    if model.vision is None:
        return None
    info = model.vision.info
    rows = info.image_rows or min(limits.max_model_len, MAX_ROWS)
    most = limits.max_num_batched_tokens - limits.max_num_seqs + 1  # all others may be decoding
    if info.two_way and most < rows:
        raise BadConfiguration(
            f"this model computes the {rows} rows of an image in one step: --max-num-batched-tokens must be at least "
            f"{rows + limits.max_num_seqs - 1}, or --max-num-seqs smaller"
        )
    return msgspec.structs.replace(info, max_rows=rows)


def _size(step: Step) -> str:
    return f"{step.num_rows} rows in {step.num_entries} entries, {step.num_decodes} of them decodes"


def _log_memory(device: torch.device, weights: int, kv: int) -> None:
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - weights - kv
    log.info("device memory, GiB: weights %.2f, KV cache %.2f, all else %.2f", weights / GIB, kv / GIB, other / GIB)


def _end_message(end: Ended) -> End:
    # An error that ends a single sequence is its grammar's; the engine's own end the engine.
    fault: Literal["engine", "request"] = "request" if end.reason == "error" else "engine"
    request, choice = end.sequence.request.key[1], end.sequence.choice
    return End(request, choice, end.reason, end.stop_token, end.message, fault)


def _token_logprobs(tokens: list[int], logprobs: Logprobs, top: int | None) -> list[TokenLogprobs]:
    rows = zip(
        tokens,
        logprobs.logprob.tolist(),
        logprobs.rank.tolist(),
        logprobs.top_tokens[:, :top].tolist(),
        logprobs.top_logprobs[:, :top].tolist(),
        strict=True,
    )
    return [TokenLogprobs(t, lp, rank, tuple(ids), tuple(values)) for t, lp, rank, ids, values in rows]
