"""The record of a step, in buffers that other steps have used before it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from runner.kernels.prepare import NEW_BLOCKS, SLOTS, STARTS
from runner.staging import Staging, upload_words
from runner.step import Step
from tests.parity.toy_device import ToyEngine
from tests.runner.test_scheduler import make_request, prompt

SLOTS_THERE, ROWS = 8, 24


def staging() -> Staging:
    model: Any = SimpleNamespace(device=torch.device("cpu"), hidden_size=1, dtype=torch.uint8)
    made = Staging(model, SLOTS_THERE, upload_words(SLOTS_THERE, 32 + ROWS, 4), ROWS)
    made.words.random_()  # as the memory was found
    return made


def assert_says(record: torch.Tensor, step: Step) -> None:
    """Entries that aren't there are of slot 0 and have no rows: a captured step launches them, too."""
    entries, rows = step.num_entries, record.numpy()
    absent = SLOTS_THERE + 1 - entries
    assert rows[SLOTS].tolist() == step.slots.tolist() + [0] * absent
    assert rows[STARTS].tolist() == step.starts.tolist() + [step.num_rows] * (absent - 1)
    assert rows[NEW_BLOCKS].tolist() == step.new_blocks.tolist() + [0] * absent
    assert np.all(np.diff(rows[STARTS]) >= 0)


def test_a_record_says_nothing_of_the_steps_before_it() -> None:
    """Sequences come and go, and for many steps stay the same: then little of a record is written anew."""
    generator = random.Random(7)
    engine = ToyEngine(num_slots=SLOTS_THERE, max_num_batched_tokens=ROWS, num_blocks=16, overlap=True)
    ring = [staging() for _ in range(3)]
    launched = same = before = 0
    for number in range(120):
        if generator.random() < 0.6:
            length = generator.randrange(1, 16)
            engine.add(make_request(number, prompt(length, number), generator.randrange(1, 17)))
        for _ in range(generator.choice([1, 1, 2, 9])):
            step = engine.schedule()
            if step is not None:
                buffers = ring[launched % len(ring)]
                launched += 1
                assert buffers.fill(step) >= buffers.record.numel()
                assert_says(buffers.record, step)
                same += step.members == before != 0
                before = step.members
            if engine.launched and (step is None or len(engine.launched) > engine.depth):
                engine.retire()
    assert launched > 200 and same > 50
    assert engine.scheduler.preemptions > 0
