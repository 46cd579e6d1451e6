"""One step on the device: upload, prepare inputs, gather rows, forward, sample, move the slots on, download.

Called by the engine loop with a `Step`, in two halves: forward (upload to logits) and sampling. Each is one closure
handed to the stream, so on CUDA it is queued and on the CPU deferred (`runner.stream`). On CUDA a half is one graph
launch (`runner.step_graphs`), unless the step is larger than the graphs or asks for something that they don't hold. One
packed int32 upload a step carries the schedule and the newly admitted sequences; it happens in every step, so that no
path can forget it. Nothing else is uploaded but the embedding rows of a prompt chunk and, between the halves, the token
masks of entries that a grammar constrains. Sampled ids stay in the slots; the host gets a copy, a step late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.attention.backend import AttentionBackend, AttentionBatch
from runner.grammar import Outcome
from runner.hints import counted_ids
from runner.kernels.admit import admit
from runner.kernels.embed import gather_rows
from runner.kernels.prepare import SLOTS, STARTS, advance_slots, prepare_inputs
from runner.kernels.token_mask import mask_logits
from runner.kv_cache import KVCache
from runner.latents import LatentRows
from runner.model import Model
from runner.position_ids import PositionIds
from runner.sampler import Asks, LogitEdits, Logprobs, SamplingState, logprobs_of, sample
from runner.sequence import Request, Sequence
from runner.slots import SlotState, StepInputs
from runner.staging import Staging, record_words, upload_words
from runner.step import PromptScore, Step
from runner.step_graphs import StepGraphs, StepSize
from runner.stream import Event, make_stream
from runner.taken_rows import TakenRows, take_rows
from runner.token_bans import BanEdit, TokenBans

STAGING_DEPTH = 3
"""Steps whose staging buffers exist at once: one in preparation, two launched."""
_COMPILED_TOPS = (1, 20, 64)
"""Numbers of best tokens between which `kernels.logprobs` chooses a kernel."""
_GAP = 16
"""Rows that are copied for nothing sooner than a copy more is begun."""
_NOTHING_ASKED = Asks()
SCORE_ROWS = 256
"""Rows whose logits exist at once while a prompt is scored."""


def max_admitted_rows(max_model_len: int, max_num_batched_tokens: int) -> int:
    """Known rows of the sequences that one step may admit, together: what the upload has room for."""
    return max_model_len + max_num_batched_tokens


class MaskMismatch(RuntimeError):
    """The debug check: the device took a token row for an embedding, or the other way round."""


@dataclass(eq=False)
class Launched:
    """A step on its way. The fields below `done` may be read only after `done.wait()`."""

    step: Step
    done: Event
    staging: Staging
    tokens: Tensor
    """[S] int64, host; entry i's sampled token."""
    logprobs: Logprobs | None = None
    """Of the entries in `logprob_entries`, on the host."""
    logprob_entries: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[PromptScore, Tensor, Logprobs]] = field(default_factory=list)
    """(what was scored, the ids at its positions, their log-probabilities), on the host."""
    mask_shape: tuple[int, int] = (0, 0)
    """(entries that a grammar constrains, int32 words of each one's mask): what `stage_masks` has made room for."""
    hidden: TakenRows | None = None
    """Of the step's `hidden_runs`, on the host."""
    latents: Tensor | None = None
    """[len(step.latent_outputs), hidden], host."""
    ends: list[tuple[Sequence, Outcome]] = field(default_factory=list)
    """Sequences of this step that their grammar ends before the token that it samples."""
    captured: bool = False
    """Whether the forward was a captured graph."""


class DeviceStep:
    def __init__(self, model: Model, cache: KVCache, backend: AttentionBackend, *, num_slots: int, max_model_len: int,
                 max_num_batched_tokens: int, debug_checks: bool) -> None:  # fmt: skip
        device = model.device
        self.model, self.cache, self.backend = model, cache, backend
        self.num_slots, self.debug_checks = num_slots, debug_checks
        self.stream = make_stream(device)
        self.slots = SlotState.allocate(num_slots, max_model_len, cache.block_size, device)
        self.sampling = SamplingState.allocate(num_slots, device)
        self.inputs = StepInputs.allocate(max_num_batched_tokens, num_slots, device, two_way=model.two_way)
        self.position_ids: PositionIds | None = None
        """Where they aren't the rows' places."""
        if model.mrope:
            self.position_ids = PositionIds(max_num_batched_tokens, num_slots, STAGING_DEPTH, device)
        self.rows = torch.zeros(max_num_batched_tokens, model.hidden_size, dtype=model.dtype, device=device)
        self._hidden = torch.zeros_like(self.rows)
        """[T, hidden]: the running step's last hidden states. What reads them needs no graph of its own."""
        self._latents = LatentRows(model, num_slots)
        words = upload_words(num_slots, max_admitted_rows(max_model_len, max_num_batched_tokens), cache.block_size)
        self.upload = torch.zeros(words, dtype=torch.int32, device=device)
        self._record = self.upload[: record_words(num_slots)].view(3, -1)
        self._logits = torch.zeros(num_slots, model.vocab_size, dtype=model.dtype, device=device)
        """What the first half of a step leaves for the second, by entry."""
        self._sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._masks = torch.empty(0, dtype=torch.int32, device=device)
        """The device's copy of `Staging.masks`."""
        self._graphs: StepGraphs | None = None
        self._asks = np.zeros((3, num_slots), np.bool_)
        """By slot, on the host: whether its sequence asks for penalties, for filters, for anything by entry."""
        self._ring = [Staging(model, num_slots, words, max_num_batched_tokens) for _ in range(STAGING_DEPTH)]
        self._bans: WeakKeyDictionary[Request, TokenBans] = WeakKeyDictionary()
        self._launches = 0
        if debug_checks:
            self.slots.fill_with_garbage(model.vocab_size, cache.num_blocks)
            self.rows.normal_()
            cache.fill_with_garbage()

    @property
    def padded_sizes(self) -> list[int]:
        """Rows that steps with prompts are padded to, ascending."""
        return [] if self._graphs is None else self._graphs.mixed_sizes

    def cheapest_prompt_rows(self) -> int | None:
        """Prompt rows that cost least each, beside decodes; None where steps aren't captured. To be asked after
        `capture`, before the first step: what is replayed finds nothing scheduled."""
        return None if self._graphs is None else self._graphs.cheapest_prompt_rows()

    def capture(self, progress: Callable[[str], None] = lambda stage: None) -> None:
        """On CUDA: captures the step's graphs. Nothing may be running; no slot is touched (the record is empty)."""
        self.upload.zero_()
        graphs = StepGraphs(self.num_slots, len(self.rows), self.slots.token_ids.shape[1], self.backend.short_seq_len)
        graphs.capture(self._forward_pass, self._choose, progress)
        self._graphs = graphs
        self._compile_the_rest()

    @torch.inference_mode()
    def _compile_the_rest(self) -> None:
        """Kernels that no graph holds are compiled now, not when the first request asks for one."""
        admit(self.upload, self._record.numel(), 0, 1, self.slots, self.sampling.floats, self.sampling.ints)
        for filters in (False, True):
            self._choose(1, Asks(penalties=True, filters=filters))
        for top in _COMPILED_TOPS:
            logprobs_of(self._logits[:1], self._sampled[:1], min(top, self.model.vocab_size))
        words = -(-self.model.vocab_size // 32)
        masks = torch.zeros(words + 1, dtype=torch.int32, device=self.model.device)
        mask_logits(self._logits, masks[words:], masks[:words].view(1, words))

    def launch_forward(self, step: Step) -> Launched:
        """Hands a step's first half to the device, up to the logits, and returns at once. Waits for nothing in flight,
        so a token that the host must know before it can sample (a grammar's) holds up only the second half."""
        index = self._launches % STAGING_DEPTH
        staging = self._ring[index]
        self._launches += 1
        if staging.done is not None:
            staging.done.wait()
        words = staging.fill(step)
        for admission in step.admissions:
            params = admission.sequence.request.sampling
            asks, by_entry = Asks.of(params), params.edits_logits or params.logprobs is not None
            self._asks[:, admission.sequence.slot] = asks.penalties, asks.filters, by_entry
        if self.debug_checks:
            staging.tokens.fill_(-(2**40))
        launched = Launched(step, _NEVER, staging, staging.tokens)
        if self.position_ids is not None:
            self.stream.run(self.position_ids.stage(step, index))
        self.stream.run(lambda: self._forward(launched, words))
        return launched

    def stage_masks(self, launched: Launched, entries: list[int], words: int) -> NDArray[np.int32]:
        """Room for the token masks of some entries, [len(entries), words] int32, to be filled before
        `launch_sampling`, which uploads them: the only thing that a step uploads between its halves."""
        launched.mask_shape = len(entries), words
        return launched.staging.reserve_masks(entries, words)

    def launch_sampling(self, launched: Launched) -> None:
        """Hands over the second half. `Launched.done` then says when the results are on the host."""
        asks, edits, launched.logprob_entries = self._asks_of(launched.step)
        self.stream.run(lambda: self._sample(launched, asks, edits))
        staging = launched.staging
        launched.done = staging.done = self.stream.record(staging.done)

    # --- on the host, before the launch -----------------------------------------------------------------------------

    def _asks_of(self, step: Step) -> tuple[Asks, LogitEdits | None, list[int]]:
        """What entries ask of sampling beyond a temperature; last, those that want log-probabilities."""
        if not np.count_nonzero(step.asking):
            return _NOTHING_ASKED, None, []
        asking = np.nonzero(step.asking)[0]
        penalties, filters, by_entry = self._asks[:, step.slots[asking]]
        asks = Asks(bool(penalties.any()), bool(filters.any()))
        changes, bans, logprob_entries = [], [], []
        for entry in asking[by_entry].tolist():
            sequence = step.sequences[entry]
            params = sequence.request.sampling
            if params.logit_bias:
                changes.append((entry, dict(params.logit_bias)))
            early = step.positions[entry] - sequence.request.answer_start < params.min_tokens
            if early and params.stop_token_ids and sequence.matcher is None:  # a grammar's mask knows of it
                changes.append((entry, dict.fromkeys(params.stop_token_ids, -np.inf)))
            if params.allowed_token_ids or params.bad_words:
                bans.append(BanEdit(entry, self._bans_of(sequence.request)))
            if params.logprobs is not None:
                logprob_entries.append(entry)
        return asks, self._edits(changes, bans), logprob_entries

    def _edits(self, changes: list[tuple[int, dict[int, float]]], bans: list[BanEdit]) -> LogitEdits | None:
        """Two small copies, whatever the number of entries. `changes`: (entry, what its token ids' logits get)."""
        if not changes and not bans:
            return None
        places = [entry * self.model.vocab_size + token for entry, values in changes for token in values]
        added = [value for _, values in changes for value in values.values()]
        return LogitEdits(
            self._to_device(torch.tensor(places, dtype=torch.int64)),
            self._to_device(torch.tensor(added, dtype=torch.float32)),
            tuple(bans),
        )

    def _bans_of(self, request: Request) -> TokenBans:
        """Uploaded once a request: a vocabulary's worth of ids must not travel in every step."""
        if request not in self._bans:
            self._bans[request] = TokenBans.of(request.sampling, self._to_device)
        return self._bans[request]

    def _to_device(self, host: Tensor) -> Tensor:
        """A small tensor of its own, copied without waiting for the device."""
        if self.model.device.type != "cuda":
            return host
        return host.pin_memory().to(self.model.device, non_blocking=True)

    # --- on the device ----------------------------------------------------------------------------------------------

    # What is handed to the stream in most steps is copies and graphs: only what computes enters inference mode.

    def _forward(self, launched: Launched, words: int) -> None:
        step, staging = launched.step, launched.staging
        if step.admissions:
            self.upload[:words].copy_(staging.words[:words], non_blocking=True)
        else:
            self._record.copy_(staging.record, non_blocking=True)
        for row, end in _ranges(step.embedding_runs):
            self.rows[row:end].copy_(staging.rows[row:end], non_blocking=True)
        if len(step.latent_inputs):
            self._latents.place(step, self.rows, self._to_device)
        if step.admissions:
            longest = max(len(admission.sequence.token_ids) for admission in step.admissions)
            sampling, count = self.sampling, len(step.admissions)
            admit(self.upload, self._record.numel(), count, longest, self.slots, sampling.floats, sampling.ints)
        if self.debug_checks:
            self._hidden.fill_(torch.nan)
        size = StepSize(step.num_rows, step.num_entries, step.num_decodes, int(step.computed.max()))
        graph = None
        if self._graphs is not None and not step.prompt_scores:
            graph = self._graphs.forward(size)
        launched.captured = graph is not None
        if graph is not None:
            graph.replay()
        else:
            hidden = self._forward_pass(size, step.starts.tolist(), step.computed.tolist())
            self._score_prompts(launched, hidden)
        if step.hidden_runs:
            launched.hidden = take_rows(self._hidden, step.hidden_runs, self._to_device, _to_host)
        if len(step.latent_outputs):
            launched.latents = _to_host(self._latents.keep(step, self._hidden, self._to_device))
        if self.debug_checks:
            self._check_mask(step)

    def _sample(self, launched: Launched, asks: Asks, edits: LogitEdits | None) -> None:
        step, asking = launched.step, launched.logprob_entries
        entries = step.num_entries
        constrained, raw = launched.mask_shape[0] > 0, self._logits
        changed = (asks.penalties or edits is not None) and raw.dtype == torch.float32
        if asking and (constrained or changed):
            raw = raw[:entries].clone()  # else the sampler changes a copy of its own
        if constrained:
            self._apply_masks(launched)
        graph = None
        if self._graphs is not None and edits is None and not asking:
            graph = self._graphs.sampling(entries, asks)
        if graph is not None:
            graph.replay()
        else:
            self._choose(entries, asks, edits)
            if asking:
                top = max(step.sequences[entry].request.sampling.logprobs or 0 for entry in asking)
                index = self._to_device(torch.tensor(asking))
                launched.logprobs = _logprobs_to_host(logprobs_of(raw[index], self._sampled[index], top))
        if len(step.latent_outputs):
            self._latents.mark(step, self.slots, self._to_device)
        launched.tokens.copy_(self._sampled, non_blocking=True)

    def _apply_masks(self, launched: Launched) -> None:
        """To the first half's logits, where they lie: whatever samples them, a graph or not, finds them masked."""
        count, words = launched.mask_shape
        size = count * (words + 1)
        if len(self._masks) < size:
            self._masks = torch.empty(self.num_slots * (words + 1), dtype=torch.int32, device=self._masks.device)
        self._masks[:size].copy_(launched.staging.masks[:size], non_blocking=True)
        masks, entries = self._masks[: count * words].view(count, words), self._masks[count * words : size]
        mask_logits(self._logits, entries, masks)

    # The two below are what is captured: nothing in them depends on data that only the host has.

    @torch.inference_mode()
    def _forward_pass(self, size: StepSize, host_starts: list[int] | None = None,
                      host_seq_lens: list[int] | None = None) -> Tensor:  # fmt: skip
        """From the uploaded schedule to the logits; returns the last hidden states, [T, hidden] (so has `_hidden`).

        Args:
            host_starts, host_seq_lens: of the step's own entries, for backends that can't be captured.
        """
        rows, entries, inputs = size.rows, size.entries, self.inputs
        prepare_inputs(self._record, entries, rows, self.cache.block_size, self.slots, inputs)
        batch = AttentionBatch(
            backend=self.backend,
            key_caches=self.cache.keys,
            value_caches=self.cache.values,
            block_table=self.slots.block_table,
            entry_slots=self._record[SLOTS],
            entry_starts=self._record[STARTS],
            seq_lens=inputs.seq_lens,
            positions=inputs.positions[:rows],
            cache_index=inputs.cache_index[:rows],
            num_entries=entries,
            num_decodes=size.decodes,
            max_seq_len=size.max_seq_len,
            host_starts=host_starts or [],
            host_seq_lens=host_seq_lens or [],
            attend_until=None if inputs.attend_until is None else inputs.attend_until[:rows],
        )
        ids = self.position_ids
        positions = batch.positions if ids is None else ids.derive(batch.positions, self._record)
        hidden = self.model.forward(self._input_rows(rows), positions, batch)
        self._hidden[:rows].copy_(hidden)
        # Where every entry is a decode, entry i's row is row i.
        last = hidden if size.decodes == entries else hidden[inputs.last_rows[:entries]]
        self.model.logits(last, out=self._logits[:entries])
        return hidden

    @torch.inference_mode()
    def _choose(self, entries: int, asks: Asks, edits: LogitEdits | None = None) -> None:
        """From the logits to each slot's next token."""
        slot, logits = self._record[SLOTS, :entries], self._logits[:entries]
        sample(logits, slot, self.slots, self.sampling, asks, edits, self._sampled)
        advance_slots(self._record, entries, self.inputs, self._sampled, self.slots)

    def _input_rows(self, rows: int) -> Tensor:
        """[T, hidden]: table rows and the clients' rows, each where it belongs."""
        ids, is_token = self.inputs.token_ids[:rows], self.inputs.is_token_ids[:rows]
        table = self.model.embedding_table
        if table is None:
            return torch.where(is_token[:, None], self.model.embed(ids), self.rows[:rows])
        out = torch.empty(rows, self.model.hidden_size, dtype=self.model.dtype, device=ids.device)
        gather_rows(ids, is_token, self.rows, table, out)
        return out

    @torch.inference_mode()
    def _score_prompts(self, launched: Launched, hidden: Tensor) -> None:
        for score in launched.step.prompt_scores:
            count = score.end - score.start
            slot = int(launched.step.slots[score.entry])  # the host's: indexing with the device's would wait for it
            targets = counted_ids(self.slots.token_ids[slot, score.start : score.end].long())
            parts = []
            for first in range(0, count, SCORE_ROWS):
                last = min(first + SCORE_ROWS, count)
                logits = self.model.logits(hidden[score.first_row + first : score.first_row + last])
                parts.append(logprobs_of(logits, targets[first:last].clamp(min=0), score.top))
            joined = Logprobs(*(torch.cat([getattr(p, f) for p in parts]) for f in Logprobs.__dataclass_fields__))
            launched.prompt_logprobs.append((score, _to_host(targets), _logprobs_to_host(joined)))

    def _check_mask(self, step: Step) -> None:
        expected = torch.ones(step.num_rows, dtype=torch.bool)
        for row, run in step.embedding_runs:
            expected[row : row + len(run)] = False
        expected[torch.from_numpy(step.starts[step.latent_inputs])] = False
        if not torch.equal(self.inputs.is_token_ids[: step.num_rows].cpu(), expected):
            raise MaskMismatch(f"is_token_ids differs from the schedule in a step of {step.num_rows} rows")


def _ranges(runs: list[tuple[int, NDArray[np.uint8]]]) -> list[tuple[int, int]]:
    """(first row, row behind the last) of the copies that bring a step's embedding rows to the device. Runs close to
    each other go in one: the rows between them are tokens', whose place in the buffer is never read."""
    ranges: list[tuple[int, int]] = []
    for row, run in runs:
        start, end = row, row + len(run)
        if ranges and row - ranges[-1][1] <= _GAP:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges


class _Never:
    def wait(self) -> None:
        raise RuntimeError("waited for a step before it was launched")


_NEVER = _Never()


def _to_host(tensor: Tensor) -> Tensor:
    """Readable once the step is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _logprobs_to_host(logprobs: Logprobs) -> Logprobs:
    return Logprobs(*(_to_host(getattr(logprobs, name)) for name in Logprobs.__dataclass_fields__))
