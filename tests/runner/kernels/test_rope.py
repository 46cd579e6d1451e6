"""`rope_and_write`: the reference against transformers' functions, the kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from runner.kernels.rope import HeadNorm, RopeTable, rope_and_write, rope_and_write_reference
from runner.kernels.rope_triton import rope_and_write_triton


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    norm: str | None = None


CASES = [
    Case(1, 1, 1, 64, 64),
    Case(6, 9, 3, 64, 64),
    Case(3, 14, 2, 64, 64, "plain"),
    Case(4, 8, 8, 128, 128, "plain"),
    Case(2, 4, 2, 256, 256, "gemma"),
    Case(5, 6, 2, 80, 80),
    Case(5, 6, 2, 96, 96, "gemma"),
    Case(4, 4, 4, 96, 48),
    Case(3, 4, 4, 64, 32, "plain"),
    Case(130, 18, 2, 64, 32, "plain"),
]


def make_args(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], HeadNorm | None]:
    torch.manual_seed(case.rows * case.heads)
    # Three layouts: heads first, a slice of a merged projection, contiguous.
    query = torch.randn(case.heads, case.rows, case.head_dim).to(dtype).transpose(0, 1)
    key = torch.randn(case.rows, 3 * case.kv_heads, case.head_dim).to(dtype)[:, : case.kv_heads]
    value = torch.randn(case.rows, case.kv_heads, case.head_dim).to(dtype)
    angles = torch.rand(50, case.rotary_dim // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, dim=1).to(dtype) for f in (torch.cos, torch.sin))
    key_cache, value_cache = torch.randn(2, 16, 16, case.kv_heads, case.head_dim).to(dtype)
    index, positions = torch.randperm(256)[: case.rows], torch.randint(50, (case.rows,))
    norm = None
    if case.norm:
        weights = torch.randn(2, case.head_dim).to(dtype)
        norm = HeadNorm(weights[0], weights[1], 1e-3, case.norm == "gemma")
    return [query, key, value, cos, sin, positions, key_cache, value_cache, index], norm


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_norm_rope_and_write_of_transformers(case: Case) -> None:
    args, norm = make_args(case, torch.float32)
    query, key, value, cos, sin, positions, key_cache, value_cache, index = args
    expected_query, expected_key = query, key
    if norm:
        kind = Gemma3RMSNorm if norm.unit_offset else Qwen3RMSNorm
        modules = [kind(case.head_dim, eps=norm.eps) for _ in range(2)]
        modules[0].weight.data, modules[1].weight.data = norm.query_weight, norm.key_weight
        expected_query, expected_key = modules[0](query).detach(), modules[1](key).detach()
    r = case.rotary_dim
    turned = apply_rotary_pos_emb(
        expected_query[None, ..., :r], expected_key[None, ..., :r], cos[positions][None], sin[positions][None], 2
    )
    expected_query = torch.cat([turned[0][0], expected_query[..., r:]], -1)
    expected_key = torch.cat([turned[1][0], expected_key[..., r:]], -1)
    caches = key_cache.clone(), value_cache.clone()
    caches[0].view(-1, *key.shape[1:])[index] = expected_key
    caches[1].view(-1, *key.shape[1:])[index] = value

    table = RopeTable(cos, sin)
    out = rope_and_write_reference(query, key, value, table, positions, key_cache, value_cache, index, norm)
    assert torch.equal(out, expected_query) and out.is_contiguous()
    assert torch.equal(key_cache, caches[0]) and torch.equal(value_cache, caches[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_on_the_cpu(case: Case, dtype: torch.dtype, threads: int) -> None:
    args, norm = make_args(case, dtype)
    query, key, value, cos, sin, positions, key_cache, value_cache, index = args
    table, keys, values = RopeTable(cos, sin), key_cache.clone(), value_cache.clone()
    expected = rope_and_write_reference(query, key, value, table, positions, keys, values, index, norm)
    out = rope_and_write(query, key, value, table, positions, key_cache, value_cache, index, norm)
    # With a norm a sum's order may round a head's factor otherwise.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else ((2**-6, 6e-2) if norm else (0, 0))
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(key_cache, keys, rtol=rtol, atol=atol)
    assert torch.equal(value_cache, values) and out.is_contiguous()


BROKEN = torch.nan, torch.inf, -torch.inf, -torch.nan


def broken_args() -> list[Tensor]:
    """The keys' and the values' second head holds what isn't finite, its last value among it."""
    args, _ = make_args(Case(3, 4, 2, 64, 32), torch.float16)
    for rows in args[1], args[2]:
        rows[1, 1, -len(BROKEN) :] = rows[1, 1, : len(BROKEN)] = torch.tensor(BROKEN).half()
    return args


def test_what_is_cached_is_finite(threads: int) -> None:
    query, key, value, cos, sin, positions, key_cache, value_cache, index = broken_args()
    rope_and_write(query, key, value, RopeTable(cos, sin), positions, key_cache, value_cache, index)
    caches = [cache.view(-1, 2, 64)[index] for cache in (key_cache, value_cache)]
    assert all(bool(cache.isfinite().all()) for cache in caches)
    assert torch.equal(caches[1], torch.where(value.isfinite(), value, 0))
    assert torch.equal(caches[0][..., 32:], torch.where(key.isfinite(), key, 0)[..., 32:])


def test_what_a_kernel_caches_is_finite(triton_device: torch.device) -> None:
    args = broken_args()
    query, key, value, cos, sin, positions, key_cache, value_cache, index = args
    rope_and_write_reference(query, key, value, RopeTable(cos, sin), positions, key_cache, value_cache, index)
    query, key, value, cos, sin, positions, keys, values, index = (x.to(triton_device, copy=True) for x in args)
    rope_and_write_triton(query, key, value, RopeTable(cos, sin), positions, keys, values, index)
    assert torch.equal(keys.isfinite().cpu(), key_cache.isfinite()) and torch.equal(values.cpu(), value_cache)
    torch.testing.assert_close(keys.cpu(), key_cache, rtol=2**-9, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_kernel(case: Case, dtype: torch.dtype, triton_device: torch.device) -> None:
    args, norm = make_args(case, dtype)
    there = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=triton_device).copy_(x) if i < 3 else
        x.to(triton_device, copy=True)
        for i, x in enumerate(args)
    ]  # fmt: skip
    there_norm = norm and replace(
        norm, query_weight=norm.query_weight.to(triton_device), key_weight=norm.key_weight.to(triton_device)
    )
    q, k, v, cos, sin, positions, key_cache, value_cache, index = args
    expected = rope_and_write_reference(q, k, v, RopeTable(cos, sin), positions, key_cache, value_cache, index, norm)
    q, k, v, cos, sin, positions, keys, values, index = there
    out = rope_and_write_triton(q, k, v, RopeTable(cos, sin), positions, keys, values, index, there_norm)
    # In bf16 the reference rounds both products too; cancellation makes that an absolute error.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-6, 6e-2)
    torch.testing.assert_close(out.cpu(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(keys.cpu(), key_cache, rtol=rtol, atol=atol)
    assert torch.equal(values.cpu(), value_cache)
