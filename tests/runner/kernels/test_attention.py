"""Paged attention: the SDPA reference against transformers' own masks and eager formula, the kernels against SDPA."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from runner.attention.backend import AttentionBatch
from runner.attention.sdpa import SdpaAttention
from runner.attention.triton_attention import TritonAttention
from runner.attention.triton_decode import _num_splits
from runner.attention.triton_tiles import Tiles
from runner.limits import Limits
from runner.trial import as_captured, trial_batch

GARBAGE = {"nan": torch.nan, "large": 3e4, "inf": torch.inf}


@dataclass
class Case:
    """One step over a paged cache whose unused rows hold garbage."""

    entries: tuple[tuple[int, int], ...]
    """(rows of this step, rows computed before); decodes first."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    padding: int = 0
    """Rows past the step's own."""
    garbage: str = "nan"
    two_way: tuple[tuple[int, int, int], ...] | None = None
    """(entry, first position, the one behind the last) of spans that attend both ways; () where none is in a step of a
    model that may have some."""

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.entries)

    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}


def make_batch(case: Case, seed: int = 0) -> tuple[Tensor, AttentionBatch, list[tuple[Tensor, Tensor]]]:
    """(query, batch, each entry's whole key and value as [length, kv_heads, head_dim])."""
    torch.manual_seed(seed)
    lengths = [rows + before for rows, before in case.entries]
    num_slots = len(lengths) + 3
    blocks_per_seq = -(-max(lengths, default=1) // case.block_size) + 2
    num_blocks = num_slots * blocks_per_seq + 1
    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    key_cache, value_cache = (torch.full(shape, GARBAGE[case.garbage], dtype=case.dtype) for _ in range(2))
    # Unused entries of the table name blocks of garbage.
    block_table = 1 + torch.randperm(num_blocks - 1)[: num_slots * blocks_per_seq].view(num_slots, -1).int()
    slots = torch.randperm(num_slots)[: len(lengths)]
    sequences = []
    for slot, length in zip(slots, lengths, strict=True):
        key, value = (torch.randn(length, case.kv_heads, case.head_dim).to(case.dtype) for _ in range(2))
        where = torch.arange(length)
        index = block_table[slot, where // case.block_size].long() * case.block_size + where % case.block_size
        key_cache.view(-1, *shape[2:])[index] = key
        value_cache.view(-1, *shape[2:])[index] = value
        sequences.append((key, value))

    starts = [0]
    for rows, _ in case.entries:
        starts.append(starts[-1] + rows)
    total = case.num_rows + case.padding
    entry_slots = torch.zeros(num_slots + 1, dtype=torch.int32)
    entry_slots[: len(lengths)] = slots
    entry_starts = torch.full((num_slots + 1,), case.num_rows, dtype=torch.int32)
    entry_starts[: len(starts)] = torch.tensor(starts)
    seq_lens = torch.zeros(num_slots, dtype=torch.int32)
    seq_lens[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
    positions = torch.cat([torch.arange(before, before + rows) for rows, before in case.entries] or [torch.zeros(0)])
    batch = AttentionBatch(
        backend=SdpaAttention(),
        key_caches=[key_cache],
        value_caches=[value_cache],
        block_table=block_table,
        entry_slots=entry_slots,
        entry_starts=entry_starts,
        seq_lens=seq_lens,
        positions=torch.cat([positions.long(), torch.zeros(case.padding, dtype=torch.int64)]),
        cache_index=torch.zeros(total, dtype=torch.int64),
        num_entries=len(lengths),
        num_decodes=next((i for i, (rows, _) in enumerate(case.entries) if rows > 1), len(lengths)),
        max_seq_len=max(lengths, default=0),
        host_starts=starts,
        host_seq_lens=lengths,
    )
    if case.two_way is not None:
        batch.attend_until = (batch.positions + 1).int()
        for entry, first, end in case.two_way:
            row = starts[entry] + first - case.entries[entry][1]
            batch.attend_until[row : row + end - first] = end
    # As the model gives it: a transposed view of [1, heads, T, head_dim].
    query = torch.randn(1, case.heads, total, case.head_dim).to(case.dtype)[0].transpose(0, 1)
    return query, batch, sequences


def run_triton(query: Tensor, batch: AttentionBatch, case: Case, device: torch.device, **tiles: Tiles) -> Tensor:
    moved = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    caches = {name: [cache.to(device) for cache in getattr(batch, name)] for name in ("key_caches", "value_caches")}
    there = AttentionBatch(**{**vars(batch), **moved, **caches})
    args = query.to(device), there.key_caches[0], there.value_caches[0], there
    return TritonAttention(**tiles).attend(*args, **case.options()).cpu()


def run_on_cpu(query: Tensor, batch: AttentionBatch, case: Case) -> Tensor:
    from runner.attention.cpu_attention import CpuAttention  # needs Numba, which a GPU's machine may lack

    return CpuAttention().attend(query, batch.key_caches[0], batch.value_caches[0], batch, **case.options())


def dense(query: Tensor, case: Case, sequences: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Each sequence by transformers' eager attention, under transformers' mask, in fp32."""
    module = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads, training=False)
    outs = []
    start = 0
    for entry, ((rows, before), (key, value)) in enumerate(zip(case.entries, sequences, strict=True)):
        group = torch.full((1, rows + before), -1)
        for number, (owner, first, end) in enumerate(case.two_way or ()):
            if owner == entry:
                group[0, first:end] = number
        # As Gemma 3 puts them together.
        mask_function = or_masks(causal_mask_function, blockwise_overlay(group))
        if case.window is not None:
            mask_function = and_masks(mask_function, sliding_window_overlay(case.window))
        seen = torch.arange(rows + before)
        visible = mask_function(torch.tensor(0), torch.tensor(0), seen[before:, None], seen[None])
        mask = torch.zeros(rows, rows + before).masked_fill(~visible, torch.finfo(torch.float32).min)
        q, k, v = (x.float().transpose(0, 1)[None] for x in (query[start : start + rows], key, value))
        out, _ = eager_attention_forward(
            module, q, k, v, mask[None, None], scaling=case.head_dim**-0.5, softcap=case.softcap
        )
        outs.append(out[0])
        start += rows
    return torch.cat(outs)


DECODES = ((1, 0), (1, 15), (1, 16), (1, 99), (1, 37))
CHUNKS = ((5, 0), (33, 40), (2, 15), (70, 0), (17, 1))
MIXED = ((1, 50), (1, 3), (20, 0), (9, 60), (1, 0), (1, 31), (40, 5))
"""Entries of one row stand behind the first chunk too: a prompt's last row left over, or a full prefix hit."""

CASES = {
    "decodes": Case(DECODES),
    "chunks": Case(CHUNKS),
    "mixed": Case(MIXED),
    "one row": Case(((1, 0),), heads=1, kv_heads=1),
    "one chunk": Case(((3, 0),)),
    "groups of 3": Case(MIXED, heads=9, kv_heads=3),
    "groups of 7": Case(MIXED, heads=14, kv_heads=2, window=9),
    "groups of 8": Case(MIXED, heads=8, kv_heads=1, block_size=32),
    "no groups": Case(MIXED, heads=2, kv_heads=2, block_size=32),
    "groups of 20": Case(MIXED, heads=20, kv_heads=1, block_size=64),
    "head size 80": Case(MIXED, head_dim=80),
    "head size 96": Case(DECODES, head_dim=96, window=20),
    "head size 128": Case(MIXED, heads=5, kv_heads=1, head_dim=128, block_size=32),
    "head size 256": Case(((1, 40), (12, 20)), head_dim=256, softcap=20.0, window=8),
    "window": Case(MIXED, window=16),
    "window of one": Case(MIXED, window=1),
    "window of a tile": Case(((1, 131), (40, 90), (130, 0)), window=32),
    "wide window": Case(MIXED, window=50, block_size=32),
    "window beyond": Case(MIXED, window=1000),
    "softcap": Case(MIXED, softcap=2.0),
    "softcap and window": Case(MIXED, softcap=5.0, window=33),
    "large garbage": Case(MIXED, garbage="large", window=33),
    "infinite garbage": Case(MIXED, garbage="inf", softcap=30.0),
    "two-way": Case(MIXED, two_way=((2, 3, 17), (3, 60, 69), (6, 5, 6), (6, 10, 45))),
    "two-way, window": Case(MIXED, window=7, two_way=((2, 3, 17), (3, 61, 69), (6, 10, 40))),
    "two-way of tiles": Case(((200, 9), (140, 0)), window=50, two_way=((0, 20, 190), (1, 0, 31), (1, 40, 140))),
    "two-way, none": Case(MIXED, two_way=(), window=16),
    "two-way, bf16": Case(((1, 5), (150, 0)), dtype=torch.bfloat16, head_dim=256, two_way=((1, 3, 130),), kv_heads=1),
    "bf16": Case(MIXED, dtype=torch.bfloat16),
    "bf16 window, softcap": Case(MIXED, dtype=torch.bfloat16, head_dim=80, window=21, softcap=10.0),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def assert_close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert bool(ours.isfinite().all())
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < (2e-6 if dtype == torch.float32 else 6e-3)
    assert torch.allclose(ours.double(), expected.double(), atol=5e-6 if dtype == torch.float32 else 3e-2)


@each_case
def test_sdpa_is_eager_attention_under_the_masks_of_transformers(case: Case) -> None:
    # The reference's garbage is finite: it hides what nobody may see by a weight of zero.
    case = Case(**{**vars(case), "garbage": "large"})
    query, batch, sequences = make_batch(case)
    out = SdpaAttention().attend(query, batch.key_caches[0], batch.value_caches[0], batch, **case.options())
    assert_close(out, dense(query, case, sequences), case.dtype)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_of_the_cpu(case: Case, dtype: torch.dtype, threads: int) -> None:
    # Chunks that attend both ways are SDPA's, see above; all else reads nothing that isn't its own.
    case = Case(**{**vars(case), "dtype": dtype, "garbage": "nan" if case.two_way is None else "large"})
    query, batch, sequences = make_batch(case)
    out = run_on_cpu(query, batch, case)
    assert out.is_contiguous() and out.dtype == dtype
    assert_close(out[: case.num_rows], dense(query, case, sequences), dtype)


@pytest.mark.parametrize("head_dim", [15, 33])
def test_odd_head_sizes_on_the_cpu(head_dim: int, threads: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = Case(MIXED, head_dim=head_dim, dtype=dtype, window=20, garbage="large")
        query, batch, sequences = make_batch(case)
        assert_close(run_on_cpu(query, batch, case), dense(query, case, sequences), dtype)


LONG = {
    "one": Case(((1, 2000),), heads=9, kv_heads=3),
    "one of many heads": Case(((1, 1500),), heads=20, kv_heads=1, head_dim=80),
    "beside short ones": Case(((1, 3), (1, 3000), (1, 40)), block_size=32),
    "as long as two pieces": Case(((1, 511), (1, 3)), kv_heads=1),
    "window": Case(((1, 3000), (1, 5)), window=1100),
    "softcap": Case(((1, 1300),), softcap=5.0, head_dim=128, kv_heads=1),
    "rows that don't see the last piece": Case(((27, 1010), (1, 2)), kv_heads=1, window=900),
}
"""Sequences that threads share by their cached rows."""


@pytest.mark.parametrize("case", LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_long_sequences_on_the_cpu(case: Case, dtype: torch.dtype, threads: int) -> None:
    case = Case(**{**vars(case), "dtype": dtype, "garbage": "nan"})
    query, batch, sequences = make_batch(case)
    assert_close(run_on_cpu(query, batch, case), dense(query, case, sequences), dtype)


def test_more_threads_than_heads_share_a_sequence() -> None:
    """Of another number of pieces in another order, the same sum but for rounding; and every part of it counts."""
    pytest.importorskip("numba")
    case, before = Case(((1, 4000), (1, 700)), heads=2, kv_heads=1), torch.get_num_threads()
    query, batch, sequences = make_batch(case)
    for threads in (3, 5, 8):
        torch.set_num_threads(threads)
        try:
            assert_close(run_on_cpu(query, batch, case), dense(query, case, sequences), case.dtype)
        finally:
            torch.set_num_threads(before)


@each_case
def test_kernels(case: Case, triton_device: torch.device) -> None:
    query, batch, sequences = make_batch(case)
    out = run_triton(query, batch, case, triton_device)
    assert out.is_contiguous() and out.dtype == case.dtype
    assert_close(out, dense(query, case, sequences), case.dtype)


@pytest.mark.parametrize("tiles", [Tiles(16, 16, 4, 1), Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)], ids=str)
@pytest.mark.parametrize("name", ["mixed", "window of a tile", "groups of 7", "softcap and window", "two-way of tiles"])
def test_kernels_with_other_tiles(name: str, tiles: Tiles, triton_device: torch.device) -> None:
    case = CASES[name]
    query, batch, sequences = make_batch(case)
    out = run_triton(query, batch, case, triton_device, decode_tiles=tiles, prefill_tiles=tiles)
    assert_close(out, dense(query, case, sequences), case.dtype)


@pytest.mark.parametrize("window", [None, 70])
def test_a_padded_decode_step(window: int | None, triton_device: torch.device) -> None:
    """A graph for 8 decodes, replayed with 5: the host's counts are the graph's, the device's are the step's."""
    case = Case(DECODES, padding=3, window=window)
    query, batch, sequences = make_batch(case)
    batch.num_entries = batch.num_decodes = 8
    batch.max_seq_len = 4096
    out = run_triton(query, batch, case, triton_device)
    assert_close(out[:5], dense(query[:5], case, sequences), case.dtype)
    assert not out[5:].any()


def test_padded_rows_of_an_eager_decode_step_are_zeros(triton_device: torch.device) -> None:
    case = Case(DECODES, padding=11)
    query, batch, sequences = make_batch(case)
    out = run_triton(query, batch, case, triton_device)
    assert_close(out[:5], dense(query[:5], case, sequences), case.dtype)
    assert not out[5:].any()


@pytest.mark.parametrize("entries", [MIXED, CHUNKS, DECODES, ((70, 3),), ()], ids=str)
def test_a_padded_mixed_step(entries: tuple[tuple[int, int], ...], triton_device: torch.device) -> None:
    """A graph for mixed steps takes any of them, whatever its own counts: even decodes alone, and nothing at all."""
    case = Case(entries, padding=130 - sum(rows for rows, _ in entries), window=40)
    query, batch, sequences = make_batch(case)
    batch.num_entries = len(batch.seq_lens)
    batch.num_decodes = batch.num_entries - 1
    batch.max_seq_len = 4096
    out = run_triton(query, batch, case, triton_device)
    if entries:
        assert_close(out[: case.num_rows], dense(query[: case.num_rows], case, sequences), case.dtype)
    assert not out[case.num_rows :].any()


@pytest.mark.parametrize("max_num_seqs", [1, 5])
def test_the_largest_step_as_a_graph_counts_it(max_num_seqs: int, triton_device: torch.device) -> None:
    """What is measured at load is what a mixed graph launches, and computes the same as the chunk alone."""
    model: Any = SimpleNamespace(kv_shapes=[(2, 32)], dtype=torch.float32, device=triton_device, two_way=False)
    torch.manual_seed(0)
    backend, query = TritonAttention(), torch.randn(21, 4, 32, device=triton_device)
    plain = trial_batch(model, backend, 21, 16)
    captured = as_captured(plain, Limits(4096, max_num_seqs, 21))
    assert captured.num_entries == max_num_seqs == captured.num_decodes + 1
    keys, values = plain.key_caches[0].normal_(), plain.value_caches[0].normal_()
    outs = [
        backend.attend(query, keys, values, batch, scale=0.3, window=None, softcap=None) for batch in (plain, captured)
    ]
    torch.testing.assert_close(*outs)


def test_long_sequences_beside_short_ones_are_split(triton_device: torch.device, monkeypatch: Any) -> None:
    """With the device already full of programs, only a long sequence takes more than one split."""
    monkeypatch.setattr("runner.attention.triton_decode._UNSPLIT_PROGRAMS", 1)
    monkeypatch.setattr("runner.attention.triton_decode.LONG_SPLIT", 64)
    case = Case(((1, 400), (1, 20), (1, 63), (1, 64), (1, 3000)))
    query, batch, sequences = make_batch(case)
    assert_close(run_triton(query, batch, case, triton_device), dense(query, case, sequences), case.dtype)


@pytest.mark.parametrize(
    ("captured", "replayed", "num_decodes"),
    [
        (((1, 99), (1, 0), (1, 40)), ((1, 5), (1, 98), (1, 99)), 3),
        (((1, 99), (20, 0), (9, 60)), ((30, 2), (1, 7), (1, 99)), 2),
    ],
    ids=["decode", "mixed"],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_replays_another_schedule(captured: Any, replayed: Any, num_decodes: int) -> None:
    cases = [Case(e, padding=40 - sum(rows for rows, _ in e), window=60) for e in (captured, replayed)]
    device = torch.device("cuda")
    query, batch, _ = make_batch(cases[0], 1)
    other_query, other, sequences = make_batch(cases[1], 2)
    backend = TritonAttention()
    tensors = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    key_cache, value_cache, there = batch.key_caches[0].to(device), batch.value_caches[0].to(device), query.to(device)
    static = AttentionBatch(**{**vars(batch), **tensors, "num_decodes": num_decodes})

    def attend() -> Tensor:
        return backend.attend(there, key_cache, value_cache, static, **cases[0].options())

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for name, tensor in tensors.items():
        tensor.copy_(getattr(other, name))
    key_cache.copy_(other.key_caches[0])
    value_cache.copy_(other.value_caches[0])
    there.copy_(other_query)
    graph.replay()
    case = cases[1]
    assert_close(out[: case.num_rows].cpu(), dense(other_query[: case.num_rows], case, sequences), case.dtype)
    assert not out[case.num_rows :].any()


def test_the_number_of_splits() -> None:
    def splits(programs: int, max_seq_len: int) -> tuple[int, int]:
        return _num_splits(programs, max_seq_len, 64)

    assert splits(8, 131_072) == (64, 64)  # few sequences: as many splits as are useful
    assert splits(8, 1024) == (16, 16)  # but none of less than a tile
    assert splits(128, 1024) == (4, 4)
    assert splits(256, 1024) == (1, 1)  # enough to fill the device without
    assert splits(1024, 1024) == (1, 1)
    assert splits(2048, 1024) == (1, 1)
    assert splits(2048, 32_768) == (1, 8)  # room for the long ones


@pytest.mark.parametrize("seed", range(25))
def test_random_steps(seed: int, triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    decodes = tuple((1, draw(0, 150)) for _ in range(draw(0, 4)))
    chunks = tuple((draw(1, 60), draw(0, 100)) for _ in range(draw(0 if decodes else 1, 3)))
    kv_heads, group = draw(1, 2), draw(1, 8)
    case = Case(
        decodes + chunks,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=[64, 80, 96, 128][draw(0, 3)],
        block_size=[16, 32, 64][draw(0, 2)],
        window=[None, draw(1, 130)][draw(0, 1)],
        softcap=[None, 10.0][draw(0, 1)],
        dtype=[torch.float32, torch.bfloat16][draw(0, 1)],
        padding=draw(0, 20),
        garbage=["nan", "large"][draw(0, 1)],
    )
    query, batch, sequences = make_batch(case, seed)
    out = run_triton(query, batch, case, triton_device)
    assert_close(out[: case.num_rows], dense(query, case, sequences), case.dtype)
    assert not out[case.num_rows :].any()
