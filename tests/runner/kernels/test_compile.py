"""Compiles what the launching functions launch, for sm_90 and without a GPU: the interpreter runs code that Triton's
compiler refuses (types that differ between branches), and knows no limit on shared memory.

Runs where Triton is installed and doesn't interpret; on a CUDA device the other tests compile the same and run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.attention import triton_decode, triton_prefill
from runner.kernels import activation_triton, few_rows_triton, rope_triton, split_k_triton
from runner.kernels import rms_norm_triton as norms
from runner.kernels._triton import HAS_TRITON
from runner.kernels.activation_triton import gated_triton
from runner.kernels.admit_triton import admit_triton
from runner.kernels.cache_write_triton import write_kv_triton
from runner.kernels.embed_triton import gather_rows_triton
from runner.kernels.few_rows_triton import few_rows_linear_triton
from runner.kernels.filters import Floors
from runner.kernels.filters_triton import filter_floors_triton
from runner.kernels.gumbel_triton import gumbel_argmax_triton
from runner.kernels.logprobs_triton import logprobs_of_triton
from runner.kernels.penalties_triton import apply_penalties_triton
from runner.kernels.prepare_triton import advance_slots_triton, prepare_inputs_triton
from runner.kernels.rms_norm_triton import add_rms_norm_triton, rms_norm_triton
from runner.kernels.rope import RopeTable
from runner.kernels.rope_triton import rope_and_write_triton
from runner.kernels.split_k_triton import gated_linear_triton, split_k_linear_triton
from runner.kernels.token_mask_triton import mask_logits_triton
from tests.runner.kernels import (
    test_admit,
    test_attention,
    test_cache_write,
    test_embed,
    test_few_rows,
    test_gumbel,
    test_penalties,
    test_prepare,
    test_rope,
    test_split_k,
)
from tests.runner.kernels.conftest import INTERPRETED

pytestmark = [
    pytest.mark.skipif(
        not HAS_TRITON or INTERPRETED or torch.cuda.is_available(), reason="needs Triton, not interpreting, and no GPU"
    ),
    pytest.mark.timeout(600),
]

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on Hopper."""

CPU = torch.device("cpu")


class Sm90:
    """In the place of Triton's CUDA driver, where there is none."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every launch within the test is compiled instead, and appended here."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Any] = []
    plain: Callable[..., Any] = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(plain(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setattr(JITFunction, "run", run)
    driver.set_active(Sm90())
    return launches


def assert_fit(compiled: list[Any], count: int) -> None:
    assert len(compiled) == count
    for kernel in compiled:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("wide", [False, True])
def test_attention_compiles(head_dim: int, dtype: torch.dtype, wide: bool, compiled: list[Any]) -> None:
    """Decodes and chunks, short (tiles of 64) and long (of 128), plain and with everything on."""
    rows = 300 if wide else 3
    for entries, count in ((((1, 99), (1, 5)), 2), (((1, 99), (rows, 5)), 3)):
        case = test_attention.Case(entries, head_dim=head_dim, dtype=dtype)
        if wide:
            case.window, case.softcap, case.two_way = 30, 5.0, ((1, 5, 20),)
        query, batch, _ = test_attention.make_batch(case)
        test_attention.run_triton(query, batch, case, CPU)
        assert_fit(compiled, count)
        compiled.clear()


def test_the_others_compile(compiled: list[Any]) -> None:
    step = test_prepare.make_step(3, num_slots=7, max_rows=60, max_model_len=50, block_size=16)
    prepare_inputs_triton(*step.prepare_args())
    advance_slots_triton(step.record, 1, step.out, torch.zeros(7, dtype=torch.int64), step.slots)
    words = torch.zeros(2, 157, dtype=torch.int32)
    mask_logits_triton(torch.zeros(3, 5000), torch.zeros(2, dtype=torch.int32), words)
    upload, admissions, longest = test_admit.make_case(0, 40)
    admit_triton(upload, test_admit.RECORD, len(admissions), longest, *test_admit.make_state(40))
    two_way = test_prepare.make_step(2, num_slots=7, max_rows=60, max_model_len=50, block_size=16)
    prepare_inputs_triton(*two_way.prepare_args())
    assert_fit(compiled, 5)
    compiled.clear()
    for dtype in (torch.float32, torch.bfloat16):
        token_ids, is_token_ids, rows, table = test_embed.make_case(5, 576, dtype)
        gather_rows_triton(token_ids, is_token_ids, rows, table, torch.empty(5, 576, dtype=dtype))
        for layout in ("heads first", "merged"):
            key, value, keys, values, index = test_cache_write.make_case(7, 3, 80, layout, dtype)
            write_kv_triton(key, value, keys, values, index)
    assert_fit(compiled, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fused_pieces_of_models_compile(dtype: torch.dtype, compiled: list[Any]) -> None:
    x, weight = torch.zeros(3, 2048, dtype=dtype), torch.zeros(2048, dtype=dtype)
    for unit_offset in (False, True):
        rms_norm_triton(x, weight, 1e-5, unit_offset)
        add_rms_norm_triton(x, x, weight, 1e-5, unit_offset)
    gated_triton(x, "silu")
    gated_triton(x, "gelu_tanh")
    assert_fit(compiled, 6)
    compiled.clear()
    for case in test_rope.CASES:
        (q, k, v, cos, sin, positions, keys, values, index), norm = test_rope.make_args(case, dtype)
        rope_and_write_triton(q, k, v, RopeTable(cos, sin), positions, keys, values, index, norm)
    assert_fit(compiled, len(test_rope.CASES))


@pytest.mark.parametrize("large, programs", [(8 << 20, 132), (0, 132), (0, 2), (0, 1)])
def test_projections_compile(large: int, programs: int, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_k_triton, "_LARGE", large)
    monkeypatch.setattr(split_k_triton, "_PROGRAMS", programs)
    x, weight, bias = test_split_k.make_args(test_split_k.Case(33, 8192, 200, 1, bias=True), torch.bfloat16)
    split_k_linear_triton(x, weight, bias)
    gated_linear_triton(x, weight, bias, "silu")
    assert_fit(compiled, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_sampler_compiles(dtype: torch.dtype, compiled: list[Any]) -> None:
    for vocab in (700, 50_000):
        logits = torch.zeros(3, vocab, dtype=dtype)
        slot, sampling, length = test_gumbel.make_state(torch.zeros(3))
        gumbel_argmax_triton(logits, slot, sampling, length)
        gumbel_argmax_triton(logits, slot.long(), sampling, length, Floors(torch.zeros(3), slot))
        filter_floors_triton(logits, slot, sampling)
        for top in (0, 1, 20):
            logprobs_of_triton(logits, slot.long(), top)
    # One split needs no second launch.
    many = torch.zeros(600, 700, dtype=dtype)
    gumbel_argmax_triton(many, *test_gumbel.make_state(torch.zeros(600)))
    apply_penalties_triton(*test_penalties.make_case(3, 5000, 3000))
    assert_fit(compiled, 9 + 11 + 1 + 3)


def test_kernels_that_start_early_wait_first(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched while the kernel before it still runs, a kernel may ask for weights and for where a step's rows are
    (`kernels._triton.dependent_launch` says why), and for nothing else, until it has waited; and it has to wait on
    every path, since the kernel behind it counts on that."""
    pieces = (activation_triton, few_rows_triton, norms, rope_triton, split_k_triton)
    for module in (triton_decode, triton_prefill, *pieces):
        monkeypatch.setattr(module, "dependent_launch", lambda tensor: {"PDL": True, "launch_pdl": True})
    dtype = torch.bfloat16
    x, weight = torch.zeros(2, 1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
    rms_norm_triton(x, weight, 1e-5)
    add_rms_norm_triton(x, x, weight, 1e-5, True)
    for case in test_few_rows.CASES:
        few_rows_linear_triton(*test_few_rows.make_args(case, dtype))
    for split_case in test_split_k.CASES:
        split_k_linear_triton(*test_split_k.make_args(split_case, dtype))
    gated_linear_triton(*test_split_k.make_args(test_split_k.CASES[1], dtype), "silu")
    rms_norm_triton(torch.zeros(2, 2, 1024), weight, 1e-5)
    reads_early = list(compiled)
    gated_triton(x, "silu")
    (q, k, v, cos, sin, positions, keys, values, index), norm = test_rope.make_args(test_rope.CASES[0], dtype)
    rope_and_write_triton(q, k, v, RopeTable(cos, sin), positions, keys, values, index, norm)
    for entries in (((1, 99), (1, 5)), ((1, 99), (70, 5))):
        query, batch, _ = test_attention.make_batch(test_attention.Case(entries, dtype=dtype))
        test_attention.run_triton(query, batch, test_attention.Case(entries, dtype=dtype), CPU)
    assert len(compiled) == len(reads_early) + 2 + 2 + 3
    for kernel in compiled:
        code = kernel.asm["ptx"]
        before, waits, behind = code.partition("griddepcontrol.wait")
        assert waits and kernel.metadata.launch_pdl
        assert "griddepcontrol.launch_dependents" in behind
        forbidden = ["st.global", "atom.", " red.", "\tred.", "ret;", "bra", "launch_dependents"]
        if kernel not in reads_early and kernel.metadata.name != "_decode_kernel":
            forbidden += ["ld.global", "cp.async"]
        assert not [each for each in forbidden if each in before.partition(".entry")[2]], kernel.metadata.name
