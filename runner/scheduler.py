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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.blocks import BlockPool
from runner.fair_queue import FairQueue
from runner.messages import EMBEDDING_ID, FinishReason
from runner.prompt_pace import PromptPace, filled
from runner.sequence import Key, Request, Sequence
from runner.slot_table import SlotTable
from runner.step import Admission, HiddenRun, PromptScore, Step

_PUBLISHED_AT_ONCE = 8
"""Blocks of an answer: looking them up, one after another, costs more than the hashes themselves."""
_NEVER = 2**30
"""In place of a number of published blocks: no sequence has so many."""


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


@dataclass
class _Running:
    """Who is running between two steps: found once, and good until somebody joins, or has nothing left to launch."""

    decodes: NDArray[np.intp]
    """[D]: slots that lack one row."""
    prefills: NDArray[np.intp]
    """[P]: slots that lack more, as they were admitted."""
    number: int
    """`Step.members` of steps of these decodes alone."""
    sequences: list[Sequence] | None = None
    """[D], once there was such a step."""
    grown: bool = False
    """No decode has rows left that were known at its admission: all rows to come are the answer's."""


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
        self._running: _Running | None = None
        """None: to be found anew."""
        self._compositions = 0
        """How often that was."""
        self._launches = 0
        self._retirements = 0
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
        self._asking = 0
        """Slots whose sequences ask for more than a temperature."""
        self._leaving = 0
        """Slots that are kept for steps in flight only."""
        self._num_clients = num_clients
        # Parts of many a step, never written to.
        self._ones: NDArray[np.int32] = np.ones(num_slots, np.int32)
        self._zeros: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self._nobody: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._one_by_one: NDArray[np.int32] = np.arange(num_slots + 1, dtype=np.int32)
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
    def num_in_flight(self) -> int:
        """Steps that were launched and have not retired."""
        return self._launches - self._retirements

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or self.num_in_flight > 0

    # --- before a launch --------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, counted as launched; None if nothing can be launched before the step in flight retires (or at
        all)."""
        table = self.table
        while True:
            running = self._running = self._running or self._find_running()
            decodes = running.decodes
            lacking = (table.computed[decodes] // self.block_size >= table.num_blocks[decodes]).nonzero()[0]
            if len(lacking) <= self.pool.num_free:
                break
            if self.num_in_flight:
                return None
            self._preempt_newest()
        new_blocks = self._allocate(decodes, lacking)
        chunks: list[tuple[int, int]] = []
        admissions: list[Admission] = []
        if len(running.prefills) or (table.free and self.waiting):
            chunks, admissions = self._take_prompts(running)
        if len(decodes):
            self.pace.took(sum(rows for _, rows in chunks))
        if not chunks:
            ones = self._ones[: len(decodes)]
            return self._launch(decodes, ones, new_blocks, len(decodes), admissions) if len(decodes) else None
        chunks.sort(key=_is_long)  # a prompt's last row goes with the decodes
        num_decodes = len(decodes) + sum(rows == 1 for _, rows in chunks)
        slots = np.concatenate([decodes, np.array([slot for slot, _ in chunks], np.intp)])
        counts = np.concatenate([self._ones[: len(decodes)], np.array([rows for _, rows in chunks], np.int32)])
        new_blocks = np.concatenate([new_blocks, self._zeros[: len(chunks)]])
        return self._launch(slots, counts, new_blocks, num_decodes, admissions)

    def _find_running(self) -> _Running:
        table = self.table
        lacking = table.length - table.computed
        decodes, prefills = (table.open & (lacking == 1)).nonzero()[0], (table.open & (lacking > 1)).nonzero()[0]
        if len(prefills) > 1:
            prefills = prefills[table.admission[prefills].argsort()]
        self._compositions += 1
        return _Running(decodes, prefills, self._compositions)

    def _allocate(self, decodes: NDArray[np.intp], lacking: NDArray[np.intp]) -> NDArray[np.int32]:
        """A block for each of the decodes at the places `lacking`. Returns [D]: each one's new block, or 0."""
        if not len(lacking):
            return self._zeros[: len(decodes)]
        table, slots = self.table, decodes[lacking]
        new_blocks = np.zeros(len(decodes), np.int32)
        new_blocks[lacking] = table.blocks[slots, table.num_blocks[slots]] = self.pool.allocate(len(lacking))
        table.num_blocks[slots] += 1
        return new_blocks

    def _take_prompts(self, running: _Running) -> tuple[list[tuple[int, int]], list[Admission]]:
        """The chunks of the next step, (slot, rows), and those of their sequences that are new."""
        num_decodes, prefills = len(running.decodes), running.prefills
        budget = self._prompt_budget(num_decodes, prefills)
        spare = self.budget - num_decodes - budget
        chunks: list[tuple[int, int]] = []
        for slot in prefills.tolist():
            budget = self._take_chunk(chunks, slot, budget, spare)
        admissions: list[Admission] = []
        room = self.max_admitted_rows
        while budget > 0 and (admission := self._admit(room)):
            admissions.append(admission)
            room -= len(admission.sequence.token_ids)
            budget = self._take_chunk(chunks, admission.sequence.slot, budget, spare)
        return chunks, admissions

    def _prompt_budget(self, num_decodes: int, prefills: NDArray[np.intp]) -> int:
        """Prompt rows that the next step may have: such that little of it is padding."""
        lacking: list[int] = (self.table.length[prefills] - self.table.computed[prefills]).tolist()
        most = budget = self.budget - num_decodes
        if num_decodes:
            most = min(budget, self.pace.most)
            budget = min(budget, self.pace.rows(self._first_prompt(lacking), sum(lacking) + self.waiting.rows))
        if not self.padded_sizes:
            return budget
        wanted = sum(lacking)
        for sequence, _ in zip(self.waiting, self.table.free, strict=False):
            if wanted > budget:
                break
            wanted += len(sequence.token_ids)
        return filled(budget, wanted, num_decodes, most, self.padded_sizes)

    def _first_prompt(self, lacking: list[int]) -> int:
        """Rows that the prompt whose turn it is still lacks; 0 if there is none."""
        if lacking:
            return lacking[0]
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
        if not sequence.scores_prompt and not (request.is_alone and sequence.admission < 0):
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
        table.published[slot] = _NEVER if request.is_alone else len(cached)
        table.admission[slot] = sequence.admission = self._admissions
        (table.worker[slot], table.request[slot]), table.choice[slot] = request.key, sequence.choice
        table.client[slot] = request.client
        table.open[slot] = True
        table.asks[slot] = asks = not request.sampling.is_plain
        table.hidden_from[slot] = sequence.hidden_from
        table.set_stop_ids(slot, request.sampling.stop_token_ids)
        self._admissions += 1
        self._inspected += sequence.is_inspected
        self._asking += asks
        self._running = None
        sequence.slot = slot
        return Admission(sequence, computed, blocks)

    def _cut_back(self, request: Request, cached: list[int]) -> list[int]:
        """A hit that ends inside a two-way span is of no use from the span's start on: its rows go together."""
        blocks = len(cached)
        while (row := request.unsplit(blocks * self.block_size)) < blocks * self.block_size:
            blocks = row // self.block_size
        self.pool.release(cached[blocks:])
        return cached[:blocks]

    def _launch(self, slots: NDArray[np.intp], counts: NDArray[np.int32], new_blocks: NDArray[np.int32],
                num_decodes: int, admissions: list[Admission]) -> Step:  # fmt: skip
        table, running = self.table, self._running
        entries = len(slots)
        if running is None or slots is not running.decodes:
            running = None
            sequences, starts = table.sequences_of(slots), np.zeros(entries + 1, np.int32)
            np.cumsum(counts, out=starts[1:])
        else:
            starts = self._one_by_one[: entries + 1]
            sequences = running.sequences = running.sequences or table.sequences_of(slots)
        before, length = table.computed[slots], table.length[slots]
        computed = before + counts
        reaches_end = computed == length
        left = table.limit[slots] - length
        samples = reaches_end & (left > 0)
        # An answer's last token is never computed; a latent step is, be it the last of all rows.
        closing = reaches_end & (left <= 1)
        latent = self._nobody[:entries]
        if self._inspected:
            latent = samples & (length < table.answer_start[slots])
            closing &= ~latent
        asking = samples & table.asks[slots] & ~latent if self._asking else self._nobody[:entries]
        step = Step(slots, starts, computed, new_blocks, samples, asking, length, num_decodes, 0, sequences, admissions)
        step.closing = closing.nonzero()[0].tolist()
        step.members = 0 if running is None else running.number
        if self._inspected:
            step.latent_outputs = latent.nonzero()[0]
            step.latent_inputs = ((before >= table.admitted[slots]) & (before < table.answer_start[slots])).nonzero()[0]
            for entry in (computed > table.hidden_from[slots]).nonzero()[0].tolist():
                self._add_hidden_run(step, entry, int(before[entry]))
        if running is None or not running.grown:
            step.prompts = (before < table.admitted[slots]).nonzero()[0].tolist()
            for entry in step.prompts:
                self._add_prompt_rows(step, entry, int(before[entry]))
        self._advance(step)
        if running is None or step.closing:
            self._running = None
        else:  # Each of them lacked one row, and has it now.
            running.grown = True
        return step

    def _advance(self, step: Step) -> None:
        """Counts a step as launched."""
        table, slots = self.table, step.slots
        self._launches += 1
        table.launched[slots] = self._launches
        table.computed[slots] = step.computed
        table.length[slots] = step.positions + step.samples
        if step.closing:
            table.open[slots[step.closing]] = False
        if self._num_clients > 1:
            self.waiting.charge_tokens(table.client[slots[step.samples]])

    def _add_prompt_rows(self, step: Step, entry: int, start: int) -> None:
        """The parts of a step that only a chunk of a prompt has: its embedding rows, and the rows to score."""
        sequence, end = step.sequences[entry], int(step.computed[entry])
        request, first_row = sequence.request, int(step.starts[entry])
        step.prompt_rows += min(end, request.prompt_len) - min(start, request.prompt_len)
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
        if sequence.request.is_alone:  # It finds its own blocks again, if they are still there.
            table.published[sequence.slot] = 0
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
        self._retirements += 1
        live = ~table.ended[step.slots] if self._leaving else None
        entries = (step.samples if live is None else step.samples & live).nonzero()[0]
        slots, positions, new = step.slots, step.positions, tokens
        if len(entries) < step.num_entries:
            slots, positions, new = slots[entries], positions[entries], tokens[entries]
        latent = None
        if len(step.latent_outputs):
            latent = np.isin(entries, step.latent_outputs)
            new = np.where(latent, EMBEDDING_ID, new)
        table.token_ids[slots, positions] = new
        table.known[slots] = positions + 1
        self._offer(step, live)

        ended: dict[int, Ended] = {}
        for i in table.stopping(slots, new).tolist():
            if latent is None or not latent[i]:
                entry = int(entries[i])
                ended[entry] = Ended(step.sequences[entry], "stop", int(new[i]))
        for entry in step.closing:
            if entry not in ended and not step.sequences[entry].ended:
                ended[entry] = Ended(step.sequences[entry], "length")
        for end in ended.values():
            self._end(end.sequence)
        if live is not None:
            for entry in (~live).nonzero()[0].tolist():
                self._release_if_ended(step.sequences[entry])
        return entries if latent is None else entries[~latent], [ended[entry] for entry in sorted(ended)]

    def _offer(self, step: Step, live: NDArray[np.bool_] | None) -> None:
        """Offers blocks that a step completed to the prefix cache: a prompt's at once, and lets waiting siblings in; an
        answer's a few together (the rest once it has ended), for nobody asks for them before it is read.

        Args:
            live: [E]: whose sequences have not ended; None: all.
        """
        table, slots, computed = self.table, step.slots, step.computed
        due = computed // self.block_size - table.published[slots] >= _PUBLISHED_AT_ONCE
        due[step.prompts] = True
        places = (due if live is None else due & live).nonzero()[0]
        self._publish(slots[places].tolist(), computed[places].tolist())
        for entry in step.prompts:
            sequence = step.sequences[entry]
            if step.samples[entry] and step.positions[entry] == sequence.request.prompt_len and not sequence.ended:
                self._free_siblings(sequence)

    def _publish(self, slots: list[int], computed: list[int]) -> None:
        """Offers what is complete of these slots' blocks and was not offered before. `computed`: rows of each."""
        table, pool = self.table, self.pool
        for i, slot in enumerate(slots):
            first, end = int(table.published[slot]), computed[i] // self.block_size
            sequence = table.sequences[slot]
            if sequence is None or first >= end:
                continue
            # Every row of a complete block was an input of a step that has retired: its id has arrived.
            ids = table.token_ids[slot, : computed[i]]
            links = sequence.hashes.extend(ids, sequence.request.row_digests)
            for block, link in zip(table.blocks[slot, first:end].tolist(), links[first:end], strict=True):
                pool.publish(block, link)
            table.published[slot] = end

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
            self._close(sequence.slot)
            self.table.ended[sequence.slot] = True
            self._leaving += 1
            self._release_if_ended(sequence)

    def _close(self, slot: int) -> None:
        """It has nothing left to launch."""
        if self.table.open[slot]:
            self.table.open[slot] = False
            self._running = None

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
        if sequence.ended and sequence.slot >= 0 and self.table.launched[sequence.slot] <= self._retirements:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Nothing of it is in flight."""
        table, slot = self.table, sequence.slot
        self._publish([slot], [int(min(table.computed[slot], table.known[slot]))])
        self.pool.release(table.blocks[slot, : table.num_blocks[slot]].tolist())
        self._close(slot)
        self._inspected -= sequence.is_inspected
        self._asking -= bool(table.asks[slot])
        table.set_stop_ids(slot, ())
        self._leaving -= sequence.ended
        table.sequences[slot], table.ended[slot] = None, False
        table.free.append(slot)
        sequence.slot = -1


def _is_long(chunk: tuple[int, int]) -> bool:
    return chunk[1] > 1


def _whole_spans(request: Request, computed: int, rows: int, most: int) -> int:
    """The rows of a chunk that begins at row `computed`, so that it splits no two-way span: `rows` or fewer, or `most`
    at most where the span begins right there. (One that fits into no step is refused before it comes here.)"""
    end = request.unsplit(computed + rows)
    if end <= computed:
        end = request.two_way_end(computed)
        return end - computed if end - computed <= most else 0
    return end - computed
