"""Breaks the product in the ways in which engines of this kind have been broken, and demands that a trial notices.

The names in brackets are real failures of other servers: the number of a pull request or an issue of vLLM, unless
another project is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner import block_hash, blocks, device_step, engine, outbox, scheduler, sequence, slots
from runner.kernels import penalties, prepare
from runner.scheduler import Scheduler
from tests.models import Family
from tests.parity import trials
from tests.parity.mutate import rewrite
from tests.parity.shelf import EngineShelf
from tests.parity.trials import TRIALS, Trial

MonkeyPatch = pytest.MonkeyPatch
TinyModel = Callable[[Family], Path]


def failure(trial: Trial, tiny_model: TinyModel, **settings: Any) -> Exception | None:
    """How the trial fails on new engines, if it does."""
    try:
        trial(EngineShelf(tiny_model, **settings))
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.__name__)
def test_trial_passes_as_the_product_is(tiny_model: TinyModel, trial: Trial) -> None:
    trial(EngineShelf(tiny_model))


# --- is_token_ids ---------------------------------------------------------------------------------------------------


def last_steps_mask(patch: MonkeyPatch) -> None:
    """Each step reads the mask of the step before (#45673, #57356; and #37170 (1), where ids were scattered on the
    device and the mask was not)."""
    real = prepare.prepare_inputs_reference

    def stale(*args: Any) -> None:
        inputs: slots.StepInputs = args[-1]
        before = last.get(id(inputs), inputs.is_token_ids.clone().fill_(True))
        real(*args)
        last[id(inputs)] = inputs.is_token_ids.clone()
        inputs.is_token_ids.copy_(before)

    last: dict[int, Any] = {}
    patch.setattr(prepare, "prepare_inputs_reference", stale)


def no_mask_in_pure_decodes(patch: MonkeyPatch) -> None:
    """A step of decodes only takes a short cut that leaves the mask of the last prefill standing (#45673)."""
    real = prepare.prepare_inputs_reference

    def skipping(record: Any, num_entries: int, num_rows: int, *args: Any) -> None:
        inputs: slots.StepInputs = args[-1]
        before = inputs.is_token_ids.clone()
        real(record, num_entries, num_rows, *args)
        if num_rows == num_entries:
            inputs.is_token_ids.copy_(before)

    patch.setattr(prepare, "prepare_inputs_reference", skipping)


def mask_of_the_first_row(patch: MonkeyPatch) -> None:
    """The whole batch is treated as its first item is (sgl-project/sglang#34115)."""
    rewrite(
        patch,
        prepare,
        "prepare_inputs_reference",
        ("out.is_token_ids[:num_rows] = ids >= 0", "out.is_token_ids[:num_rows] = ids[0] >= 0"),
    )


mask_mutations = pytest.mark.parametrize(
    ("mutation", "trial"),
    [
        (last_steps_mask, trials.embeds_decoding_together),
        (no_mask_in_pure_decodes, trials.embeds_decoding_together),
        (mask_of_the_first_row, trials.whole_prompt_cached),
    ],
    ids=lambda value: value.__name__,
)


@mask_mutations
def test_wrong_mask_changes_the_output(
    tiny_model: TinyModel, monkeypatch: MonkeyPatch, mutation: Callable[[MonkeyPatch], None], trial: Trial
) -> None:
    assert failure(trial, tiny_model, debug_checks=False) is None
    mutation(monkeypatch)
    assert isinstance(failure(trial, tiny_model, debug_checks=False), AssertionError)


@mask_mutations
def test_wrong_mask_fails_the_debug_check(
    tiny_model: TinyModel, monkeypatch: MonkeyPatch, mutation: Callable[[MonkeyPatch], None], trial: Trial
) -> None:
    mutation(monkeypatch)
    assert isinstance(failure(trial, tiny_model), device_step.MaskMismatch)


# --- everything else ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """One function with other code in it."""

    name: str
    stands_for: str
    owner: Any
    function: str
    changes: tuple[tuple[str, str], ...]
    noticed_by: Trial

    def __call__(self, patch: MonkeyPatch) -> None:
        rewrite(patch, self.owner, self.function, *self.changes)


MUTATIONS = (
    Mutation(
        "row_buffer_ignored",
        "the multimodal branch embedded the placeholder ids again, over the user's rows (#45383)",
        prepare,
        "prepare_inputs_reference",
        (("out.is_token_ids[:num_rows] = ids >= 0", "pass"),),
        trials.embeds_decoding_together,
    ),
    Mutation(
        "ids_not_clamped",
        "placeholder ids of -1 reach the embedding's lookup (#45383, #40768, #46899)",
        prepare,
        "prepare_inputs_reference",
        (("ids.clamp(min=0)", "ids"),),
        trials.embeds_decoding_together,
    ),
    Mutation(
        "placeholders_after_the_first_token",
        "generated tokens never reach the next step's input (#15428)",
        prepare,
        "advance_slots_reference",
        (("sampled[:num_entries][keep].int()", "sampled[:num_entries][keep].int() * 0"),),
        trials.embeds_decoding_together,
    ),
    Mutation(
        "block_table_not_extended",
        "a decode step's block table is not uploaded",
        prepare,
        "prepare_inputs_reference",
        (("new_block > 0", "new_block < 0"),),
        trials.crowd_of_both_kinds,
    ),
    Mutation(
        "chunk_starts_at_its_spans_start",
        "a later chunk takes the embeddings of the first (#21390)",
        sequence.Request,
        "embedding_rows",
        (("rows[first - span.start:last - span.start]", "rows[:last - first]"),),
        trials.crowd_of_mixed_rows,
    ),
    Mutation(
        "tokens_misaligned_with_chunks",
        "rows of a prompt's chunk sample nothing; lists of tokens and of outputs then differ (#21390)",
        outbox.Outbox,
        "add_tokens",
        (("tokens[shares.order].tolist()", "tokens[:len(shares.order)].tolist()"),),
        trials.crowd_of_both_kinds,
    ),
    Mutation(
        "result_read_before_its_copy_landed",
        "the host reads what the device has not written yet (#36013, #29288)",
        engine.Engine,
        "_retire",
        (("launched.done.wait()", "pass"),),
        trials.embeds_decoding_together,
    ),
    Mutation(
        "mask_not_in_the_cache_key",
        "placeholder ids are all that a key has of an embedding's place (#42119)",
        block_hash.BlockHashes,
        "extend",
        (("ids.tobytes()", "ids.clip(0).tobytes()"),),
        trials.same_rows_elsewhere,
    ),
    Mutation(
        "digests_not_in_the_cache_key",
        "a change removed the embeddings from the block's hash (#28738; #20261)",
        block_hash.BlockHashes,
        "extend",
        (("link.update(row_digests[first:first + embeddings * DIGEST_BYTES])", "pass"),),
        trials.same_shape_other_rows,
    ),
    Mutation(
        "digests_of_the_first_rows_only",
        "a key has ranges of rows, not their content (InternLM/lmdeploy#4933)",
        block_hash.BlockHashes,
        "extend",
        (("first = self._digests_used * DIGEST_BYTES", "first = 0"),),
        trials.same_shape_other_rows,
    ),
    Mutation(
        "parent_not_in_the_cache_key",
        "a block is found whatever stands before it",
        block_hash.BlockHashes,
        "extend",
        (
            ("self._parent = link.digest()\n", "pass\n"),
            ("self.links.append(self._parent)", "self.links.append(link.digest())"),
        ),
        trials.same_block_other_prefix,
    ),
    Mutation(
        "salt_not_in_the_cache_key",
        "tenants can tell by the time of the first token what others have asked",
        block_hash.BlockHashes,
        "__init__",
        (("blake2b(salt, ", "blake2b(b'', "),),
        trials.strangers,
    ),
    Mutation(
        "no_last_row_after_a_full_hit",
        "everything is cached, so nothing is computed and nothing can be sampled",
        scheduler.Scheduler,
        "_admit",
        (("min(known - 1, sequence.hidden_from)", "min(known, sequence.hidden_from)"),),
        trials.whole_prompt_cached,
    ),
    Mutation(
        "evicted_block_stays_findable",
        "a cached prefix is found in a block that somebody else has overwritten",
        blocks.BlockPool,
        "allocate",
        (("digest is not None", "False"),),
        trials.conversations_that_go_on,
    ),
    Mutation(
        "shared_block_not_held",
        "the first of two holders gives the block back while the second reads it",
        blocks.BlockPool,
        "acquire",
        (("self._holders[block] += 1", "self._holders[block] = 1"),),
        trials.same_shape_other_rows,
    ),
    Mutation(
        "preempted_in_flight",
        "a sequence is preempted while a step that samples for it is on its way (#48245, #47900, #38624, #28787)",
        scheduler.Scheduler,
        "schedule",
        (("if self.num_in_flight:\n            return None", "pass"),),
        trials.crowd_of_both_kinds,
    ),
    Mutation(
        "preemption_forgets_the_answer",
        "tokens are generated again, and sent again, after a preemption (#49620)",
        scheduler.Scheduler,
        "_preempt_newest",
        (("table.token_ids[sequence.slot, :table.known[sequence.slot]].copy()", "sequence.request.token_ids"),),
        trials.crowd_of_both_kinds,
    ),
    Mutation(
        "answer_cached_under_the_prompts_ids",
        "blocks of an answer get a key before the ids in them have arrived (sgl-project/sglang#18744)",
        scheduler.Scheduler,
        "_publish",
        (
            (
                "ids = table.token_ids[slot, :computed[i]]",
                "ids = sequence.request.token_ids[np.arange(computed[i]) % 4]",
            ),
        ),
        trials.conversations_that_go_on,
    ),
    Mutation(
        "dropped_token_is_sent",
        "a sequence that a stop token has ended still gets the token of the step in flight",
        scheduler.Scheduler,
        "retire",
        (("~table.ended[step.slots]", "np.ones(len(step.slots), np.bool_)"),),
        trials.crowd_of_both_kinds,
    ),
    Mutation(
        "embedding_rows_penalised",
        "placeholder ids are counted as tokens (huggingface/transformers#45389)",
        penalties,
        "apply_penalties_reference",
        (("ids >= 0", "ids >= -1"),),
        trials.penalised,
    ),
    Mutation(
        "scores_of_placeholders",
        "ids of -1 reach the gather of prompt log-probabilities (vllm-project/vllm-metal#680)",
        device_step.DeviceStep,
        "_score_prompts",
        ((".clamp(min=0)", ""),),
        trials.scored_prompt,
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(tiny_model: TinyModel, monkeypatch: MonkeyPatch, mutation: Mutation) -> None:
    mutation(monkeypatch)
    assert failure(mutation.noticed_by, tiny_model) is not None, mutation.stands_for


def test_staging_rewritten_too_early_is_noticed(tiny_model: TinyModel, monkeypatch: MonkeyPatch) -> None:
    """A page-locked buffer is filled again while its last copy is still on its way (#25279, #54269)."""
    monkeypatch.setattr(device_step, "STAGING_DEPTH", 1)
    rewrite(monkeypatch, device_step.DeviceStep, "launch_forward", ("staging.done.wait()", "pass"))
    assert failure(trials.embeds_decoding_together, tiny_model) is not None


def test_block_freed_a_step_early_is_noticed(tiny_model: TinyModel, monkeypatch: MonkeyPatch) -> None:
    """Blocks are given back when a sequence's last step is launched: the next step's owner writes to them before the
    first one's rows are offered to the prefix cache (sgl-project/sglang#13713)."""
    real = Scheduler._launch

    def launch(self: Scheduler, *args: Any) -> Any:
        step = real(self, *args)
        table = self.table
        for slot in step.slots[~table.open[step.slots]].tolist():
            self.pool.release(table.blocks[slot, : table.num_blocks[slot]].tolist())
            table.num_blocks[slot] = 0  # So that they are not given back again at the end.
        return step

    monkeypatch.setattr(Scheduler, "_launch", launch)
    assert failure(trials.conversations_that_go_on, tiny_model) is not None


def test_slot_reused_a_step_early_is_noticed(tiny_model: TinyModel, monkeypatch: MonkeyPatch) -> None:
    """A slot is given to the next request while the last step of the one before is on its way
    (sgl-project/sglang#13713, #24221; vllm-gaudi#642)."""
    real_launch, real_give_back = Scheduler._launch, Scheduler._give_back

    def launch(self: Scheduler, *args: Any) -> Any:
        step = real_launch(self, *args)
        self.table.free += step.slots[~self.table.open[step.slots]].tolist()
        return step

    def give_back(self: Scheduler, sequence: sequence.Sequence) -> None:
        was_open = bool(self.table.open[sequence.slot])
        real_give_back(self, sequence)
        if not was_open:
            self.table.free.pop()  # It was freed at the launch.

    monkeypatch.setattr(Scheduler, "_launch", launch)
    monkeypatch.setattr(Scheduler, "_give_back", give_back)
    assert failure(trials.crowd_of_both_kinds, tiny_model) is not None
