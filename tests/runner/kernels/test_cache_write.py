"""`write_kv`: the reference against a loop, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.kernels.cache_write import write_kv, write_kv_reference
from runner.kernels.cache_write_triton import write_kv_triton

SHAPES = [(1, 1, 64), (7, 3, 80), (20, 8, 128), (5, 2, 256), (4, 20, 128)]


def make_case(rows: int, heads: int, head_dim: int, layout: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(rows * heads)
    # As rope leaves them, [1, H, T, D]; or slices of a merged projection: rows further apart than a row is long.
    heads_first = torch.randn(2, heads, rows, head_dim).to(dtype).transpose(1, 2)
    merged = torch.randn(rows, 3 * heads, head_dim).to(dtype)
    key = heads_first[0] if layout != "merged" else merged[:, heads : 2 * heads]
    value = heads_first[1] if layout == "heads first" else merged[:, 2 * heads :]
    key_cache, value_cache = (torch.randn(5, 16, heads, head_dim).to(dtype) for _ in range(2))
    return key, value, key_cache, value_cache, torch.randperm(5 * 16)[:rows]


@pytest.mark.parametrize("layout", ["heads first", "merged", "only the key rotated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_write_is_a_loop_over_rows(shape: tuple[int, int, int], layout: str) -> None:
    key, value, key_cache, value_cache, cache_index = make_case(*shape, layout, torch.float32)
    expected = key_cache.clone(), value_cache.clone()
    for row, index in enumerate(cache_index.tolist()):
        expected[0][index // 16, index % 16] = key[row]
        expected[1][index // 16, index % 16] = value[row]
    write_kv(key, value, key_cache, value_cache, cache_index)
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])


def test_what_is_cached_is_finite() -> None:
    key, value, key_cache, value_cache, cache_index = make_case(4, 2, 64, "merged", torch.float32)
    key[1, 0, :3] = value[2, 1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    write_kv(key, value, key_cache, value_cache, cache_index)
    for given, cache in ((key, key_cache), (value, value_cache)):
        assert torch.equal(cache.view(-1, 2, 64)[cache_index], torch.where(given.isfinite(), given, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["heads first", "merged", "only the key rotated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_write_kernel(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype, triton_device: torch.device
) -> None:
    key, value, key_cache, value_cache, cache_index = make_case(*shape, layout, dtype)
    keys, values = (tensor.to(triton_device, copy=True) for tensor in (key_cache, value_cache))
    write_kv_reference(key, value, key_cache, value_cache, cache_index)
    # `to` alone would not keep a slice's strides.
    there = [torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=triton_device).copy_(x) for x in (key, value)]
    write_kv_triton(there[0], there[1], keys, values, cache_index.to(triton_device))
    assert torch.equal(keys.cpu(), key_cache) and torch.equal(values.cpu(), value_cache)


def test_what_a_kernel_caches_is_finite(triton_device: torch.device) -> None:
    given = make_case(4, 2, 64, "only the key rotated", torch.float16)
    given[0][1, 0, :3] = given[1][2, 1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf]).half()
    keys, values = given[2].to(triton_device, copy=True), given[3].to(triton_device, copy=True)
    write_kv_reference(*given)
    write_kv_triton(given[0].to(triton_device), given[1].to(triton_device), keys, values, given[4].to(triton_device))
    assert torch.equal(keys.cpu(), given[2]) and torch.equal(values.cpu(), given[3])


def test_padding_lands_in_the_dummy_block_alone(triton_device: torch.device) -> None:
    key, value, key_cache, value_cache, _ = make_case(6, 2, 64, "merged", torch.float32)
    before = key_cache[1:].clone()
    caches = key_cache.to(triton_device), value_cache.to(triton_device)
    zeros = torch.zeros(6, dtype=torch.int64, device=triton_device)
    write_kv_triton(key.to(triton_device), value.to(triton_device), *caches, zeros)
    assert torch.equal(caches[0][1:].cpu(), before)
    # Which row's, they don't agree upon: on a GPU each value is of one of them.
    assert bool((caches[0][0, 0].cpu() == key).any(0).all())
