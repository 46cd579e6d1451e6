"""FlashAttention 3 for prompts: what it is asked, everywhere, with an operator written from its documentation; what it
answers, on a Hopper GPU with its wheel."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.attention import flash_attention_3
from runner.attention.flash_attention_3 import FlashAttention3
from runner.config import RunnerConfig
from runner.limits import BadConfiguration
from runner.trial import make_backend
from tests.runner.kernels.test_attention import CHUNKS, DECODES, MIXED, Case, assert_close, dense, make_batch

CASES = {
    "chunks": Case(CHUNKS),
    "mixed": Case(MIXED),
    "padded": Case(MIXED, padding=17),
    "one row of padding": Case(MIXED, padding=1),
    "decodes in a mixed step": Case(DECODES, padding=9),
    "groups of 7": Case(MIXED, heads=14, kv_heads=2, window=9),
    "window of one": Case(MIXED, window=1),
    "wide window": Case(MIXED, window=50, block_size=32),
    "head size 80": Case(MIXED, head_dim=80),
    "head size 128": Case(MIXED, heads=5, kv_heads=1, head_dim=128),
    "head size 256": Case(MIXED, head_dim=256, window=8),
    "long": Case(((1, 700), (300, 900), (513, 0))),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def mixed_step(case: Case) -> tuple[Tensor, Any, Tensor]:
    """(query, batch, the dense answer to the step's own rows): counted as a graph for mixed steps counts them."""
    query, batch, sequences = make_batch(case)
    expected = dense(query[: case.num_rows], case, sequences)
    batch.num_entries = len(batch.seq_lens)
    batch.num_decodes = batch.num_entries - 1
    batch.max_seq_len = 4096
    return query, batch, expected


def prompt_rows(case: Case) -> Tensor:
    """[T] bool: the rows of entries of more than one, and padding."""
    counts = [(rows > 1, rows) for rows, _ in case.entries] + [(True, case.padding)]
    return torch.cat([torch.full((rows,), several) for several, rows in counts])


def documented(query: Tensor, key: Tensor, value: Tensor, *, out: Tensor, cu_seqlens_q: Tensor, seqused_q: Tensor,
               seqused_k: Tensor, max_seqlen_q: int, page_table: Tensor, softmax_scale: float, is_causal: bool,
               window_size_left: int, scheduler_metadata: Tensor, num_splits: int) -> None:  # fmt: skip
    """What the interface's docstring promises of these arguments: the causal mask is aligned to the bottom right, the
    window is [i + keys - rows - left, i + keys - rows], a row that sees no key is zero."""
    assert scheduler_metadata is SCHEDULE and is_causal and num_splits == 1
    assert len(cu_seqlens_q) == len(seqused_q) + 1 == len(page_table) + 1
    for entry, (start, rows, keys) in enumerate(zip(cu_seqlens_q, seqused_q, seqused_k, strict=False)):
        assert 0 <= rows <= max_seqlen_q and start + rows <= len(query)
        assert rows or not keys  # nothing to be scheduled for
        here = slice(int(start), int(start + rows))
        k, v = (cache[page_table[entry].long()].flatten(0, 1)[: int(keys)] for cache in (key, value))
        group = query.shape[1] // key.shape[2]
        scores = torch.einsum("qhd,khd->hqk", query[here], k.repeat_interleave(group, 1)) * softmax_scale
        row, column = torch.arange(int(rows))[:, None] + int(keys - rows), torch.arange(int(keys))
        seen = column <= row
        if window_size_left >= 0:
            seen &= column >= row - window_size_left
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        out[here] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


SCHEDULE = torch.zeros(1)


STATED: Any = SimpleNamespace(fwd=documented, get_scheduler_metadata=lambda **kwargs: SCHEDULE)
"""The operators, in torch."""


@each_case
def test_what_the_operator_is_asked_are_the_prompts(case: Case) -> None:
    query, batch, expected = mixed_step(case)
    out = torch.full_like(query, torch.nan)
    backend = FlashAttention3(STATED)
    backend._attend_prompts(query, batch.key_caches[0], batch.value_caches[0], batch, out, **case.options())
    several = prompt_rows(case)
    own = several[: case.num_rows]
    if own.any():
        assert_close(out[: case.num_rows][own], expected[own], torch.float32)
    assert not out[case.num_rows :].any()
    assert out[~several].isnan().all()  # decodes are left to the other kernel


@each_case
def test_it_answers_as_dense_attention_does(case: Case) -> None:
    operators = flash_attention_3.load_operators() if torch.cuda.is_available() else None
    device = torch.device("cuda")
    if operators is None or not flash_attention_3.fits(device, torch.bfloat16):
        pytest.skip("needs a Hopper GPU and FlashAttention 3")
    query, batch, expected = mixed_step(Case(**{**vars(case), "dtype": torch.bfloat16}))
    for name, value in list(vars(batch).items()):
        if isinstance(value, Tensor):
            setattr(batch, name, value.to(device))
    keys, values = batch.key_caches[0].to(device), batch.value_caches[0].to(device)
    out = FlashAttention3(operators).attend(query.to(device), keys, values, batch, **case.options()).cpu()
    assert_close(out[: case.num_rows], expected, torch.bfloat16)
    assert not out[case.num_rows :].any()


def test_what_it_leaves_out_goes_to_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "runner.attention.triton_attention.TritonAttention._attend_prompts", lambda *args: asked.append("triton")
    )
    operators: Any = SimpleNamespace(
        fwd=lambda *args, **kwargs: asked.append("fa3"), get_scheduler_metadata=lambda **kwargs: SCHEDULE
    )
    backend = FlashAttention3(operators)
    for case in (Case(CHUNKS), Case(CHUNKS, softcap=5.0), Case(CHUNKS, two_way=()), Case(CHUNKS, head_dim=320)):
        query, batch, _ = make_batch(case)
        backend._attend_prompts(
            query, batch.key_caches[0], batch.value_caches[0], batch, torch.empty_like(query), **case.options()
        )
    assert asked == ["fa3", "triton", "triton", "triton"]


@pytest.mark.parametrize("name", ["fa3", "triton"])
def test_without_a_gpu_it_is_refused(name: Any) -> None:
    model: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(BadConfiguration, match=f"{name} needs a CUDA device"):
        make_backend(RunnerConfig("model", attention_backend=name), model)


def test_where_its_wheel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` goes without it; asked for by name, the message says what to install."""
    model: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(flash_attention_3, "fits", lambda *args: True)
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", None)
    assert type(make_backend(RunnerConfig("model"), model)).__name__ == "TritonAttention"
    with pytest.raises(BadConfiguration, match=r"intarsia\[fa3\]"):
        make_backend(RunnerConfig("model", attention_backend="fa3"), model)


def test_the_work_is_shared_out_once_a_step_and_kind_of_layer() -> None:
    asked: list[int] = []

    def share_out(**kwargs: Any) -> Tensor:
        asked.append(kwargs["window_size_left"])
        return SCHEDULE

    operators: Any = SimpleNamespace(fwd=documented, get_scheduler_metadata=share_out)
    backend, case = FlashAttention3(operators), Case(CHUNKS)
    query, batch, _ = make_batch(case)
    for window in (None, 20, None, 20):
        backend._attend_prompts(
            query, batch.key_caches[0], batch.value_caches[0], batch, torch.empty_like(query),
            **case.options() | {"window": window},
        )  # fmt: skip
    assert asked == [-1, 19]
