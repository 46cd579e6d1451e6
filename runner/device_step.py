"""One step on the device: upload, prepare inputs, gather rows, forward, sample, move the slots on, download.

Called by the engine loop with a `Step`, in two halves: forward (upload to logits) and sampling. Each is one closure handed
to the stream, so on CUDA it is queued and on the CPU deferred (`runner.stream`). One packed int32 upload a step carries
the schedule and the newly admitted sequences; it happens in every step, so that no path can forget it. Nothing else is uploaded but the
embedding rows of a prompt chunk. Sampled ids stay in the slots; the host gets a copy, a step late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.attention.backend import AttentionBackend, AttentionBatch
from runner.kernels.embed import gather_rows
from runner.kernels.prepare import NEW_BLOCKS, SLOTS, STARTS, advance_slots, prepare_inputs
from runner.kv_cache import KVCache
from runner.model import Model
from runner.sampler import Asks, LogitEdits, Logprobs, SamplingState, logprobs_of, pack, sample
from runner.slots import SlotState, StepInputs
from runner.step import Admission, PromptScore, Step
from runner.stream import Event, make_stream

STAGING_DEPTH = 3
"""Steps whose staging buffers exist at once: one in preparation, two launched."""
SCORE_ROWS = 256
"""Rows whose logits exist at once while a prompt is scored."""
_HEADER = 14
"""int32 words of an admission before its ids and blocks: slot, length, computed, prompt_len, sampling parameters."""


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
    staging: _Staging
    tokens: Tensor
    """[S] int64, host; entry i's sampled token."""
    logprobs: Logprobs | None = None
    """Of the entries in `logprob_entries`, on the host."""
    logprob_entries: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[PromptScore, Tensor, Logprobs]] = field(default_factory=list)
    """(what was scored, the ids at its positions, their log-probabilities), on the host."""


class _Staging:
    """Host buffers of one step, page-locked on CUDA. Rewritten only after the step that used them is done."""

    def __init__(self, words: int, rows: int, model: Model, num_slots: int) -> None:
        pin = model.device.type == "cuda"
        self.words = torch.empty(words, dtype=torch.int32, pin_memory=pin)
        self.rows = torch.empty(rows, model.hidden_size, dtype=model.dtype, pin_memory=pin)
        self.row_bytes: NDArray[np.uint8] = self.rows.view(torch.uint8).numpy()
        self.tokens = torch.empty(num_slots, dtype=torch.int64, pin_memory=pin)
        self.done: Event | None = None


class DeviceStep:
    def __init__(self, model: Model, cache: KVCache, backend: AttentionBackend, *, num_slots: int, max_model_len: int,
                 max_num_batched_tokens: int, debug_checks: bool) -> None:  # fmt: skip
        device = model.device
        self.model, self.cache, self.backend = model, cache, backend
        self.num_slots, self.debug_checks = num_slots, debug_checks
        self.stream = make_stream(device)
        self.slots = SlotState.allocate(num_slots, max_model_len, cache.block_size, device)
        self.sampling = SamplingState.allocate(num_slots, device)
        self.inputs = StepInputs.allocate(max_num_batched_tokens, num_slots, device)
        self.rows = torch.zeros(max_num_batched_tokens, model.hidden_size, dtype=model.dtype, device=device)
        self._record_words = 3 * (num_slots + 1)
        admitted = max_admitted_rows(max_model_len, max_num_batched_tokens)
        words = self._record_words + num_slots * (_HEADER + 1) + admitted + admitted // cache.block_size
        self.upload = torch.zeros(words, dtype=torch.int32, device=device)
        self._record = self.upload[: self._record_words].view(3, -1)
        self._ring = [_Staging(words, max_num_batched_tokens, model, num_slots) for _ in range(STAGING_DEPTH)]
        self._launches = 0
        self._logits = torch.empty(0, device=device)
        """[E, vocab] float32: what the first half of a step leaves for the second."""
        if debug_checks:
            self.slots.fill_with_garbage(model.vocab_size, cache.num_blocks)
            self.rows.normal_()
            cache.fill_with_garbage()

    def launch_forward(self, step: Step) -> Launched:
        """Hands a step's first half to the device, up to the logits, and returns at once. Waits for nothing in flight,
        so a token that the host must know before it can sample (a grammar's) holds up only the second half."""
        staging = self._ring[self._launches % STAGING_DEPTH]
        self._launches += 1
        if staging.done is not None:
            staging.done.wait()
        words = self._stage(staging, step)
        logprob_entries = [
            entry
            for entry in np.nonzero(step.samples)[0].tolist()
            if step.sequences[entry].request.sampling.logprobs is not None
        ]
        if self.debug_checks:
            staging.tokens.fill_(-(2**40))
        launched = Launched(step, _NEVER, staging, staging.tokens, logprob_entries=logprob_entries)
        self.stream.run(lambda: self._forward(launched, staging, words))
        return launched

    def launch_sampling(self, launched: Launched) -> None:
        """Hands over the second half. `Launched.done` then says when the results are on the host."""
        asks, edits = self._asks_of(launched.step)
        self.stream.run(lambda: self._sample(launched, asks, edits))
        launched.done = launched.staging.done = self.stream.record()

    # --- on the host, before the launch -----------------------------------------------------------------------------

    def _stage(self, staging: _Staging, step: Step) -> int:
        """Fills the staging buffers; returns how many words of `upload` are in use."""
        words: NDArray[np.int32] = staging.words.numpy()
        record = words[: self._record_words].reshape(3, -1)
        n = step.num_entries
        record[SLOTS, :n], record[SLOTS, n:] = step.slots, 0
        record[STARTS, : n + 1], record[STARTS, n + 1 :] = step.starts, step.num_rows
        record[NEW_BLOCKS, :n], record[NEW_BLOCKS, n:] = step.new_blocks, 0
        end = self._record_words
        for admission in step.admissions:
            sequence = admission.sequence
            known = len(sequence.token_ids)
            # Staged with the slot of the launch: a later preemption takes the sequence's slot away.
            header = [sequence.slot, known, admission.computed, sequence.request.prompt_len]
            words[end : end + 4] = header
            words[end + 4 : end + _HEADER] = pack(sequence.request.sampling, sequence.choice)
            end += _HEADER
            words[end : end + known] = sequence.token_ids
            words[end + known : end + known + len(admission.blocks)] = admission.blocks
            end += known + len(admission.blocks)
        for row, rows in step.embedding_runs:
            staging.row_bytes[row : row + len(rows)] = rows
        return end

    def _asks_of(self, step: Step) -> tuple[Asks, list[LogitEdits]]:
        asks, edits = Asks(), []
        for entry in np.nonzero(step.samples)[0].tolist():
            sequence = step.sequences[entry]
            params = sequence.request.sampling
            asks |= Asks.of(params)
            if params.logit_bias:
                edits.append(self._edit(entry, dict(params.logit_bias)))
            if step.positions[entry] - sequence.request.prompt_len < params.min_tokens and params.stop_token_ids:
                edits.append(self._edit(entry, dict.fromkeys(params.stop_token_ids, -np.inf)))
        return asks, edits

    def _edit(self, entry: int, values: dict[int, float]) -> LogitEdits:
        token_ids = self._to_device(torch.tensor(list(values), dtype=torch.int64))
        return LogitEdits(entry, token_ids, self._to_device(torch.tensor(list(values.values()), dtype=torch.float32)))

    def _to_device(self, host: Tensor) -> Tensor:
        """A small tensor of its own, copied without waiting for the device."""
        if self.model.device.type != "cuda":
            return host
        return host.pin_memory().to(self.model.device, non_blocking=True)

    # --- on the device ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _forward(self, launched: Launched, staging: _Staging, words: int) -> None:
        step = launched.step
        rows, entries = step.num_rows, step.num_entries
        self.upload[:words].copy_(staging.words[:words], non_blocking=True)
        for row, run in step.embedding_runs:
            end = row + len(run)
            self.rows[row:end].copy_(staging.rows[row:end], non_blocking=True)
        self._admit(step.admissions)
        prepare_inputs(self._record, entries, rows, self.cache.block_size, self.slots, self.inputs)
        if self.debug_checks:
            self._check_mask(step)
        hidden = self._hidden(step)
        self._logits = self.model.logits(hidden[self.inputs.last_rows[:entries]]).float()
        self._score_prompts(launched, hidden)

    @torch.inference_mode()
    def _sample(self, launched: Launched, asks: Asks, edits: list[LogitEdits]) -> None:
        step, logits = launched.step, self._logits
        entries = step.num_entries
        slot = self._record[SLOTS, :entries].long()
        raw = logits.clone() if launched.logprob_entries and (asks.penalties or edits) else logits
        tokens = sample(logits, slot, self.slots, self.sampling, asks, edits, int(step.positions.max()))
        sampled = torch.zeros(self.num_slots, dtype=torch.int64, device=tokens.device)
        sampled[:entries] = tokens
        advance_slots(self._record, entries, self.inputs, sampled, self.slots)
        launched.tokens.copy_(sampled, non_blocking=True)
        if launched.logprob_entries:
            asking = launched.logprob_entries
            top = max(step.sequences[entry].request.sampling.logprobs or 0 for entry in asking)
            index = self._to_device(torch.tensor(asking))
            launched.logprobs = _logprobs_to_host(logprobs_of(raw[index], tokens[index], top))

    def _admit(self, admissions: list[Admission]) -> None:
        """Writes what the upload says of newly admitted sequences into their slots."""
        at = self._record_words
        for admission in admissions:
            known = len(admission.sequence.token_ids)
            header, at = self.upload[at : at + _HEADER], at + _HEADER
            slot = header[:1].long()
            self.slots.length[slot], self.slots.computed[slot] = header[1:2], header[2:3]
            self.slots.prompt_len[slot] = header[3:4]
            self.sampling.floats[:, slot] = header[4:10, None].view(torch.float32)
            self.sampling.ints[:, slot] = header[10:14, None]
            self.slots.token_ids[slot, :known] = self.upload[None, at : at + known]
            at += known
            blocks = len(admission.blocks)
            self.slots.block_table[slot, :blocks] = self.upload[None, at : at + blocks]
            at += blocks

    def _hidden(self, step: Step) -> Tensor:
        """[T, hidden]: the last hidden state of each row."""
        rows, inputs = step.num_rows, self.inputs
        ids, is_token = inputs.token_ids[:rows], inputs.is_token_ids[:rows]
        if self.model.embedding_table is not None:
            embedded = torch.empty(rows, self.model.hidden_size, dtype=self.model.dtype, device=ids.device)
            gather_rows(ids, is_token, self.rows, self.model.embedding_table, embedded)
        else:
            embedded = torch.where(is_token[:, None], self.model.embed(ids), self.rows[:rows])
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
            num_entries=step.num_entries,
            num_decodes=step.num_decodes,
            max_seq_len=int(step.computed.max()),
            host_starts=step.starts.tolist(),
            host_seq_lens=step.computed.tolist(),
        )
        return self.model.forward(embedded, inputs.positions[:rows], batch)

    def _score_prompts(self, launched: Launched, hidden: Tensor) -> None:
        for score in launched.step.prompt_scores:
            count = score.end - score.start
            slot = self._record[SLOTS, score.entry].long()
            targets = self.slots.token_ids[slot, score.start : score.end].long()
            parts = []
            for first in range(0, count, SCORE_ROWS):
                last = min(first + SCORE_ROWS, count)
                logits = self.model.logits(hidden[score.first_row + first : score.first_row + last]).float()
                parts.append(logprobs_of(logits, targets[first:last].clamp(min=0), score.top))
            joined = Logprobs(*(torch.cat([getattr(p, f) for p in parts]) for f in Logprobs.__dataclass_fields__))
            launched.prompt_logprobs.append((score, _to_host(targets), _logprobs_to_host(joined)))

    def _check_mask(self, step: Step) -> None:
        expected = torch.ones(step.num_rows, dtype=torch.bool)
        for row, run in step.embedding_runs:
            expected[row : row + len(run)] = False
        if not torch.equal(self.inputs.is_token_ids[: step.num_rows].cpu(), expected):
            raise MaskMismatch(f"is_token_ids differs from the schedule in a step of {step.num_rows} rows")


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
