"""Decides what every step computes, and accounts for it when its tokens arrive.

Called by the engine loop: `schedule` before a launch, `retire` after the launched step's results are on the host. The
host runs one step ahead: `length` and `computed` below count what has been *launched*; token values arrive later. Ends
that are known beforehand (max_tokens) are applied at the launch; a surprise (a stop token, an abort) ends the sequence
at once on the host, and the row that was launched meanwhile is dropped.

Two rules keep blocks and slots safe. They are given back only when the last launched step that reads them has
retired. And a sequence is preempted only when nothing is in flight: when blocks run out, the step in flight is retired
first (it often frees some), so a preempted sequence never has a token on its way.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from runner.blocks import BlockPool
from runner.fair_queue import FairQueue
from runner.hidden import NO_POSITION
from runner.messages import EMBEDDING_ID, FinishReason
from runner.prompt_pace import PromptPace
from runner.sequence import Key, Request, Sequence
from runner.step import Admission, HiddenRun, PromptScore, Step

_SMALL_PADDING = 128
"""Rows; a step's weights have to be read for few rows as for many."""


class SlotTable:
    """The scheduler's own arrays, indexed by slot: the host's side of `slots.SlotState`."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        blocks_per_seq = -(-max_model_len // block_size)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.token_ids: NDArray[np.int32] = np.zeros((num_slots, max_model_len), np.int32)
        self.blocks: NDArray[np.int32] = np.zeros((num_slots, blocks_per_seq), np.int32)
        self.num_blocks: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.length: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.computed: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.known: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Rows whose token ids have arrived: `length` less what is in flight."""
        self.prompt_len: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.answer_start: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """`Request.answer_start`: behind the prompt, and behind its latent steps."""
        self.admitted: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Rows known at the admission. Later ones are known to the device first."""
        self.limit: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.published: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Blocks offered to the prefix cache."""
        self.admission: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.origin: NDArray[np.int64] = np.zeros((num_slots, 3), np.int64)
        """(worker, request, choice): whom its tokens go to."""
        self.client: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.in_flight: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        """Launched steps that read the slot and its blocks and have not retired."""
        self.ended: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Its sequence has ended; the slot is kept for steps in flight only."""
        self.open: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Has rows left to launch."""
        self.asks: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Its sampling asks for more than a temperature."""
        self.hidden_from: NDArray[np.int32] = np.full(num_slots, NO_POSITION, np.int32)
        """`Sequence.hidden_from`."""
        self.stop_ids: NDArray[np.int32] = np.full((num_slots, 4), -1, np.int32)
        self.free = list(range(num_slots - 1, -1, -1))

    def set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            grown = np.full((len(self.sequences), len(stop_ids)), -1, np.int32)
            grown[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = grown
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids


class Ended:
    """A sequence that a retired step ended."""

    __slots__ = ("message", "reason", "sequence", "stop_token")

    def __init__(
        self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None, message: str = ""
    ) -> None:
        self.sequence = sequence
        self.reason = reason
        self.stop_token = stop_token
        self.message = message


class Scheduler:
    """In turn among equal priorities (`fair_queue`); every running sequence decodes in every step, and what is left
    of the token budget goes to prompts, in chunks."""

    def __init__(self, *, num_slots: int, num_blocks: int, block_size: int, max_model_len: int,
                 max_num_batched_tokens: int, max_admitted_rows: int,
                 chunked_prefill_size: int | None = None, num_clients: int = 1) -> None:  # fmt: skip
        """`chunked_prefill_size`: prompt rows of a step in which others decode; None: no bound of their own."""
        if max_num_batched_tokens < num_slots:
            raise ValueError(
                "every sequence decodes in every step: max_num_batched_tokens is too small for max_num_seqs"
            )
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.pace = PromptPace(chunked_prefill_size or max_num_batched_tokens)
        self.padded_sizes: list[int] = []
        """Rows that a step with prompts is padded to, ascending (`runner.step_graphs`); empty where none is."""
        self.max_admitted_rows = max_admitted_rows
        self.pool = BlockPool(num_blocks)
        self.table = SlotTable(num_slots, max_model_len, block_size)
        self.waiting = FairQueue(num_clients)
        self.requests: dict[Key, list[Sequence]] = {}
        self.num_in_flight = 0
        self.ended_sequences = 0
        self.ended_requests = [0] * num_clients
        """Of each client."""
        self.generated_tokens = [0] * num_clients
        """Of each client, by sequences that have ended."""
        self.unqueued_rows = 0
        """Prompt rows of requests that have got their first slot, or ended without one."""
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._admissions = 0
        self._inspected = 0
        """Slots whose sequences have latent steps or are asked for hidden states: where there are none, no step is
        searched for them."""
        # A little room for the running to grow into, lest the newest be admitted only to be preempted.
        self._watermark = num_blocks // 100

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        sequences = Sequence.of_request(request)
        self.requests[request.key] = sequences
        self.waiting.add(sequences)

    def abort(self, key: Key, choice: int = -1) -> None:
        """Ends a request's sequences (one, or all) without a trace; those already ended are left alone."""
        for sequence in list(self.requests.get(key, ())):
            if choice in (-1, sequence.choice):
                self._end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence for a reason of the engine's; what is in flight of it is dropped."""
        self._end(sequence)

    def refuse(self, request: Request) -> None:
        """Counts a request that was accepted and is never to run."""
        self.ended_sequences += request.n
        self.ended_requests[request.client] += 1
        self._unqueue(request)

    @property
    def num_running(self) -> int:
        return len(self.table.sequences) - len(self.table.free)

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or self.num_in_flight > 0

    # --- before a launch --------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, counted as launched; None if nothing can be launched before the step in flight retires (or at
        all)."""
        table = self.table
        decodes = np.nonzero(table.open & (table.length - table.computed == 1))[0]
        lacking = decodes[table.computed[decodes] // self.block_size >= table.num_blocks[decodes]]
        while len(lacking) > self.pool.num_free:
            if self.num_in_flight:
                return None
            self._preempt_newest()
            decodes, lacking = decodes[table.open[decodes]], lacking[table.open[lacking]]
        new_blocks = np.zeros(len(table.sequences), np.int32)
        if len(lacking):
            blocks = self.pool.allocate(len(lacking))
            new_blocks[lacking] = blocks
            table.blocks[lacking, table.num_blocks[lacking]] = blocks
            table.num_blocks[lacking] += 1

        prefills = np.nonzero(table.open & (table.length - table.computed > 1))[0]
        budget = self._prompt_budget(len(decodes), prefills)
        spare = self.budget - len(decodes) - budget
        chunks: list[tuple[int, int]] = []  # (slot, rows)
        for slot in prefills[np.argsort(table.admission[prefills])].tolist():
            budget = self._take_chunk(chunks, slot, budget, spare)
        admissions: list[Admission] = []
        room = self.max_admitted_rows
        while budget > 0 and (admission := self._admit(room)):
            admissions.append(admission)
            room -= len(admission.sequence.token_ids)
            budget = self._take_chunk(chunks, admission.sequence.slot, budget, spare)

        singles = [slot for slot, rows in chunks if rows == 1]
        chunks = [chunk for chunk in chunks if chunk[1] > 1]
        slots = np.concatenate([decodes, singles, [slot for slot, _ in chunks]]).astype(np.int32)
        if not len(slots):
            return None
        if len(decodes):
            self.pace.took(len(singles) + sum(rows for _, rows in chunks))
        num_decodes = len(decodes) + len(singles)
        counts = np.ones(len(slots), np.int32)
        counts[num_decodes:] = [rows for _, rows in chunks]
        return self._launch(slots, counts, new_blocks[slots], num_decodes, admissions)

    def _prompt_budget(self, num_decodes: int, prefills: NDArray[np.intp]) -> int:
        """Prompt rows that the next step may have: such that little of it is padding."""
        lacking = self.table.length[prefills] - self.table.computed[prefills]
        most = budget = self.budget - num_decodes
        if num_decodes:
            most = min(budget, self.pace.most)
            first = self._first_prompt(prefills, lacking)
            budget = min(budget, self.pace.rows(first, int(lacking.sum()) + self.waiting.rows))
        if not self.padded_sizes:
            return budget
        wanted = int(lacking.sum())
        for sequence, _ in zip(self.waiting, self.table.free, strict=False):
            if wanted > budget:
                break
            wanted += len(sequence.token_ids)
        rows = num_decodes + min(wanted, budget)
        index = bisect.bisect_left(self.padded_sizes, rows)
        if index in (0, len(self.padded_sizes)) or self.padded_sizes[index] == rows:
            return budget
        below, padded = self.padded_sizes[index - 1 : index + 1]
        if wanted > budget and padded - rows <= rows - below and padded - num_decodes <= most:
            return padded - num_decodes
        # Where more is waiting anyway, the next step takes what this one leaves; else it is worth a step of its own
        # only if that saves much.
        cut = wanted > budget or padded - rows > max(rows // 8, _SMALL_PADDING)
        # But never so much that prompts hardly get on.
        return below - num_decodes if cut and 2 * (below - num_decodes) > rows - num_decodes else budget

    def _first_prompt(self, prefills: NDArray[np.intp], lacking: NDArray[np.int32]) -> int:
        """Rows that the prompt whose turn it is still lacks; 0 if there is none."""
        if len(prefills):
            return int(lacking[self.table.admission[prefills].argmin()])
        sequence = self.waiting.first() if self.waiting and self.table.free else None
        return 0 if sequence is None else len(sequence.token_ids)

    def _take_chunk(self, chunks: list[tuple[int, int]], slot: int, budget: int, spare: int) -> int:
        """`spare`: how much more than `budget` the step's first chunk may take, if a span must not be split."""
        computed = int(self.table.computed[slot])
        rows = min(int(self.table.length[slot]) - computed, budget)
        sequence = self.table.sequences[slot]
        if sequence is not None and sequence.request.two_way:
            rows = _whole_spans(sequence.request, computed, rows, budget if chunks else budget + spare)
        if rows > 0:
            chunks.append((slot, rows))
        return max(budget - rows, 0)

    def _admit(self, room: int) -> Admission | None:
        """Gives the first waiting sequence that may run a slot and the blocks of all its known rows, if both are there
        and it has at most `room` known rows."""
        table = self.table
        sequence = self.waiting.first() if table.free and self.waiting else None
        if sequence is None or len(sequence.token_ids) > room:
            return None
        request, known = sequence.request, len(sequence.token_ids)
        cached: list[int] = []
        if not sequence.scores_prompt:
            # The last row is always computed: its logits are what the next token is sampled from. So are rows whose
            # hidden states are wanted: the cache has none.
            links = sequence.hashes.extend(sequence.token_ids, request.row_digests)
            cached = self.pool.acquire(links[: min(known - 1, sequence.hidden_from) // self.block_size])
            if request.two_way:
                cached = self._cut_back(request, cached)
        missing = -(-known // self.block_size) - len(cached)
        if missing + (self._watermark if self.num_running else 0) > self.pool.num_free:
            self.pool.release(cached)
            return None
        self.waiting.remove(sequence)
        blocks = np.array(cached + self.pool.allocate(missing), np.int32)
        computed = len(cached) * self.block_size
        self.prefix_queries += 0 if sequence.scores_prompt else known
        self.prefix_hits += computed
        if sequence.admission < 0:  # The second time is nothing that its client has asked for.
            self.waiting.charge(request.client, known - computed)
        self._unqueue(request)

        slot = table.free.pop()
        table.sequences[slot] = sequence
        table.token_ids[slot, :known] = sequence.token_ids
        table.blocks[slot, : len(blocks)] = blocks
        table.num_blocks[slot] = len(blocks)
        table.length[slot] = table.known[slot] = known
        table.computed[slot] = computed
        table.prompt_len[slot], table.answer_start[slot] = request.prompt_len, request.answer_start
        table.admitted[slot] = known
        table.limit[slot] = sequence.limit
        table.published[slot] = len(cached)
        table.admission[slot] = sequence.admission = self._admissions
        table.origin[slot] = (*request.key, sequence.choice)
        table.client[slot] = request.client
        table.in_flight[slot], table.ended[slot], table.open[slot] = 0, False, True
        table.asks[slot] = not request.sampling.is_plain
        table.hidden_from[slot] = sequence.hidden_from
        table.set_stop_ids(slot, request.sampling.stop_token_ids)
        self._admissions += 1
        self._inspected += sequence.is_inspected
        sequence.slot = slot
        return Admission(sequence, computed, blocks)

    def _cut_back(self, request: Request, cached: list[int]) -> list[int]:
        """A hit that ends inside a two-way span is of no use from the span's start on: its rows go together."""
        blocks = len(cached)
        while (row := request.unsplit(blocks * self.block_size)) < blocks * self.block_size:
            blocks = row // self.block_size
        self.pool.release(cached[blocks:])
        return cached[:blocks]

    def _launch(self, slots: NDArray[np.int32], counts: NDArray[np.int32], new_blocks: NDArray[np.int32],
                num_decodes: int, admissions: list[Admission]) -> Step:  # fmt: skip
        table = self.table
        sequences = [s for slot in slots.tolist() if (s := table.sequences[slot]) is not None]
        before = table.computed[slots]
        computed = before + counts
        reaches_end = computed == table.length[slots]
        prompt_len = table.prompt_len[slots]
        prompt_rows = int((np.minimum(computed, prompt_len) - np.minimum(before, prompt_len)).sum())
        samples = reaches_end & (table.length[slots] < table.limit[slots])
        latent = (
            samples & (table.length[slots] < table.answer_start[slots]) if self._inspected else np.zeros_like(samples)
        )
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        asking = samples & table.asks[slots] & ~latent
        step = Step(slots, starts, computed, new_blocks, samples, asking, table.length[slots],
                    num_decodes, prompt_rows, sequences, admissions)  # fmt: skip
        if self._inspected:
            step.latent_outputs = np.nonzero(latent)[0]
            step.latent_inputs = np.nonzero((before >= table.admitted[slots]) & (before < table.answer_start[slots]))[0]
            for entry in np.nonzero(computed > table.hidden_from[slots])[0].tolist():
                self._add_hidden_run(step, entry, int(before[entry]))
        for entry in np.nonzero(before < table.admitted[slots])[0].tolist():
            self._add_prompt_rows(step, entry, int(before[entry]))
        table.computed[slots] = computed
        table.length[slots] += samples
        self.waiting.charge_tokens(table.client[slots[samples]])
        # An answer's last token is never computed; a latent step is, be it the last of all rows.
        table.open[slots] = ~(reaches_end & (table.length[slots] == table.limit[slots])) | latent
        table.in_flight[slots] += 1
        self.num_in_flight += 1
        return step

    def _add_prompt_rows(self, step: Step, entry: int, start: int) -> None:
        """The parts of a step that only a chunk of a prompt has: its embedding rows, and the rows to score."""
        sequence, end = step.sequences[entry], int(step.computed[entry])
        request, first_row = sequence.request, int(step.starts[entry])
        for position, rows in sequence.embedding_rows(start, end):
            step.embedding_runs.append((first_row + position - start, rows))
        if request.position_ids is not None and start < request.prompt_len:
            step.position_runs.append((first_row, request.position_ids[:, start:end]))
        top = request.sampling.prompt_logprobs
        if top is not None and sequence.scores_prompt:
            # Row p predicts position p + 1. After a preemption, rows that were scored before are not scored again.
            score_start = max(start + 1, sequence.prompt_logprobs_sent)
            score_end = min(end + 1, request.prompt_len)
            if score_start < score_end:
                score = PromptScore(entry, first_row + score_start - 1 - start, score_start, score_end, top)
                step.prompt_scores.append(score)
                sequence.prompt_logprobs_sent = score_end

    def _add_hidden_run(self, step: Step, entry: int, start: int) -> None:
        """The rows of an entry whose hidden states are wanted. (After a preemption, some may have been taken.)"""
        sequence, end = step.sequences[entry], int(step.computed[entry])
        first = max(start, sequence.hidden_from)
        summed = sequence.request.sampling.return_hidden_states == "mean"
        step.hidden_runs.append(HiddenRun(entry, int(step.starts[entry]) + first - start, first, end, summed))
        sequence.hidden_from = end
        self.table.hidden_from[sequence.slot] = end

    def _preempt_newest(self) -> None:
        """Takes slot and blocks from the sequence admitted last, of the least urgent; it waits in front of its equals,
        keeping its tokens."""
        table = self.table
        running = (s for s in table.sequences if s is not None)
        sequence = max(running, key=lambda s: (s.request.priority, s.admission))
        sequence.token_ids = table.token_ids[sequence.slot, : table.known[sequence.slot]].copy()
        self._give_back(sequence)
        self.waiting.put_back(sequence)
        self.preemptions += 1

    # --- after a step -----------------------------------------------------------------------------------------------

    def retire(self, step: Step, tokens: NDArray[np.int64]) -> tuple[NDArray[np.intp], list[Ended]]:
        """Takes in a step's results.

        Args:
            tokens: [E], read where `step.samples`.

        Returns:
            The entries whose token counts (ended sequences' and latent steps' don't), and the sequences that ended
            with this step.
        """
        table = self.table
        self.num_in_flight -= 1
        live = ~table.ended[step.slots]
        entries = np.nonzero(step.samples & live)[0]
        slots = step.slots[entries]
        latent = np.zeros(len(entries), np.bool_)
        if len(step.latent_outputs):
            latent = np.isin(entries, step.latent_outputs)
        new = np.where(latent, EMBEDDING_ID, tokens[entries])
        table.token_ids[slots, step.positions[entries]] = new
        table.known[slots] = step.positions[entries] + 1
        self._publish(step, np.nonzero(live)[0])

        stopped = (table.stop_ids[slots] == new[:, None]).any(1) & ~latent
        full = (table.known[slots] == table.limit[slots]) & ~latent
        ended: list[Ended] = []
        for i in np.nonzero(stopped | full)[0].tolist():
            sequence = step.sequences[entries[i]]
            ended.append(Ended(sequence, "stop", int(new[i])) if stopped[i] else Ended(sequence, "length"))
        # A sequence that samples nothing at all (max_tokens 0) ends with its prompt's last row.
        scored = live & ~step.samples & (step.computed == table.limit[step.slots])
        scored &= table.limit[step.slots] == table.answer_start[step.slots]
        ended += [Ended(step.sequences[entry], "length") for entry in np.nonzero(scored)[0].tolist()]

        table.in_flight[step.slots] -= 1
        for end in ended:
            self._end(end.sequence)
        for entry in np.nonzero(~live)[0].tolist():
            self._release_if_ended(step.sequences[entry])
        return entries[~latent], ended

    def _publish(self, step: Step, entries: NDArray[np.intp]) -> None:
        """Offers the blocks that this step completed to the prefix cache, and lets waiting siblings in."""
        table = self.table
        slots, computed = step.slots[entries], step.computed[entries]
        complete = computed // self.block_size
        for i in np.nonzero(complete > table.published[slots])[0].tolist():
            slot, sequence = int(slots[i]), step.sequences[entries[i]]
            # Every row of a complete block was an input of this step or an earlier one: its id has arrived.
            ids = table.token_ids[slot, : computed[i]]
            links = sequence.hashes.extend(ids, sequence.request.row_digests)
            for block in range(int(table.published[slot]), int(complete[i])):
                self.pool.publish(int(table.blocks[slot, block]), links[block])
            table.published[slot] = complete[i]
        first_tokens = step.samples[entries] & (step.positions[entries] == table.prompt_len[slots])
        for i in np.nonzero(first_tokens)[0].tolist():
            self._free_siblings(step.sequences[entries[i]])

    def _free_siblings(self, sequence: Sequence) -> None:
        for sibling in self.requests.get(sequence.request.key, ()):
            if sibling.waits_for is sequence:
                sibling.waits_for = None

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence) -> None:
        if sequence.ended:
            return
        sequence.ended = True
        self.ended_sequences += 1
        self._account(sequence)
        self._free_siblings(sequence)
        siblings = self.requests[sequence.request.key]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request.key]
            self.ended_requests[sequence.request.client] += 1
            self._unqueue(sequence.request)
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.table.open[sequence.slot] = False
            self.table.ended[sequence.slot] = True
            self._release_if_ended(sequence)

    def _account(self, sequence: Sequence) -> None:
        """What its client has had of it."""
        known = len(sequence.token_ids) if sequence.slot < 0 else int(self.table.known[sequence.slot])
        self.generated_tokens[sequence.request.client] += known - sequence.request.prompt_len
        self.waiting.ended(sequence)

    def _unqueue(self, request: Request) -> None:
        if not request.has_left_queue:
            request.has_left_queue = True
            self.unqueued_rows += request.prompt_len

    def _release_if_ended(self, sequence: Sequence) -> None:
        if sequence.ended and sequence.slot >= 0 and self.table.in_flight[sequence.slot] == 0:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        table, slot = self.table, sequence.slot
        self.pool.release(table.blocks[slot, : table.num_blocks[slot]].tolist())
        table.sequences[slot] = None
        table.open[slot] = False
        self._inspected -= sequence.is_inspected
        table.free.append(slot)
        sequence.slot = -1


def _whole_spans(request: Request, computed: int, rows: int, most: int) -> int:
    """The rows of a chunk that begins at row `computed`, so that it splits no two-way span: `rows` or fewer, or `most`
    at most where the span begins right there. (One that fits into no step is refused before it comes here.)"""
    end = request.unsplit(computed + rows)
    if end <= computed:
        end = request.two_way_end(computed)
        return end - computed if end - computed <= most else 0
    return end - computed
