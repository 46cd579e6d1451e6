"""What the CPU's kernels are made of: rounding, exponentials, threads, and the folder that they are kept in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba", reason="a GPU's machine need not have it")

from llvmlite.binding import FeatureMap  # noqa: E402

from runner.kernels import kernel_cache  # noqa: E402
from runner.kernels._numba import DTYPES, INT, Kernel, exp, fork, helper, kernel, narrow, rows, team, wide  # noqa: E402
from runner.kernels.tile_cpu import has_feature  # noqa: E402


@kernel
def _cast(tag: Any, source: int, target: int, back: int, size: int) -> None:
    wider, stored, again = rows(np.float32(0), source, size), rows(tag, target, size), rows(np.float32(0), back, size)
    for i in range(size):
        stored[i] = narrow(tag, wider[i])
        again[i] = wide(stored[i])


@kernel
def _exp(tag: Any, source: int, target: int, size: int) -> None:
    x, out = rows(tag, source, size), rows(tag, target, size)
    for i in range(size):
        out[i] = exp(x[i])


@helper
def _note(thread: int, threads: int, tag: Any, out: int) -> None:
    rows(INT, out, threads)[thread] += thread + 1


@kernel
def _notes(tag: Any, team: int, out: int) -> None:
    fork(team, _note, (tag, out))


CAST, EXP, NOTES = Kernel(_cast, "iiii"), Kernel(_exp, "iii"), Kernel(_notes, "ii")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20000,)).int()
    values = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    # Numbers too small for a normal bfloat16: machines may take them for zero.
    values = values[(values.abs() >= 2**-126) | ~values.isfinite() | (values == 0)]
    stored, back = torch.empty(len(values), dtype=dtype), torch.empty(len(values))
    CAST(dtype, values.data_ptr(), stored.data_ptr(), back.data_ptr(), len(values))
    torch.testing.assert_close(stored, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, values.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_exponentials() -> None:
    x = torch.cat([torch.linspace(-87, 88, 100_001), torch.tensor([0.0, -200.0, -torch.inf])])
    out = torch.empty_like(x)
    EXP(torch.float32, x.data_ptr(), out.data_ptr(), len(x))
    torch.testing.assert_close(out, x.double().exp().float(), rtol=2.5e-7, atol=2e-38)


def test_every_thread_of_the_team_runs_once(threads: int) -> None:
    notes = torch.zeros(3, dtype=torch.int32)
    for _ in range(100):
        NOTES(torch.float32, team(), notes.data_ptr())
    assert notes.tolist() == [100 * (n + 1) if n < threads else 0 for n in range(3)]


_ANOTHER_MACHINE = """
import torch
from runner.kernels import cpu
from runner.kernels.packed_linear_cpu import has_dot_product
from runner.kernels.rms_norm import rms_norm, rms_norm_reference

assert not has_dot_product()
cpu.compile_kernels(torch.bfloat16)
x, weight = torch.randn(5, 100).bfloat16(), torch.randn(100).bfloat16()
torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=1e-2, atol=1e-2)
"""


@pytest.mark.timeout(300)  # every kernel is compiled: 20 s where nobody else is busy
def test_processors_without_bfloat16(tmp_path: Path) -> None:
    """What the compiler has no instruction for must not become a call of a function that is not there."""
    machine = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    run_apart(_ANOTHER_MACHINE, {**machine, "NUMBA_CACHE_DIR": str(tmp_path)})


_FLOAT16 = """
import re
from unittest.mock import patch

import numba

numba.config.CPU_NAME = "sapphirerapids"
with patch("numba.core.codegen.get_host_cpu_features", lambda: "+avx,+avx2,+fma,+f16c,+avx512f,+avx512fp16"):
    from runner.kernels._numba import narrow, wide

@numba.njit(fastmath=True)
def fused(tag, x, y, z):
    return narrow(tag, wide(narrow(tag, wide(x) * wide(y))) + wide(z))

fused.compile((numba.types.int16,) * 4)
(code,) = fused.inspect_asm().values()
assert "vcvtps2ph" in code and not re.search(r"\\bv[a-z0-9]+[sp]h\\b", code.replace("vcvtps2ph", "")), code
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of one kind of processor")
def test_float16_is_computed_in_float32(tmp_path: Path) -> None:
    """A processor that has instructions for it would round once where torch rounds twice."""
    run_apart(_FLOAT16, {"NUMBA_CACHE_DIR": str(tmp_path)})


def test_instructions_that_numba_is_told_not_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process where it meets one that its target hasn't."""
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap(avx512bf16=True, fma=True))
    assert has_feature("avx512bf16") and has_feature("fma") and not has_feature("avx")
    monkeypatch.setattr(numba.config, "ENABLE_AVX", 0)
    assert not has_feature("avx512bf16") and has_feature("fma")


_FEWER_THREADS = """
import torch
from runner.kernels.rms_norm import rms_norm, rms_norm_reference

torch.set_num_threads(2)
x, weight = torch.randn(64, 1000), torch.randn(1000)
for _ in range(20):
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
"""


def test_openmp_may_give_fewer_threads_than_are_asked_for() -> None:
    run_apart(_FEWER_THREADS, {"OMP_THREAD_LIMIT": "1"})


@pytest.mark.timeout(300)
def test_a_damaged_cache_costs_a_warning(tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    run_apart(_FEWER_THREADS, environment)
    for kept in tmp_path.rglob("*.nbc"):
        kept.write_bytes(b"")
    assert "compiled anew" in run_apart(_FEWER_THREADS, environment).stderr


_TWO_DTYPES = """
import fcntl
from pathlib import Path

import numba
import torch
from numba.core.caching import IndexDataCacheFile
from runner.kernels.rms_norm import rms_norm, rms_norm_reference

save = IndexDataCacheFile.save

def watched(self, key, data):
    with open(Path(numba.config.CACHE_DIR) / "lock") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("kept by one writer")
    save(self, key, data)

IndexDataCacheFile.save = watched
for dtype in (torch.float32, torch.bfloat16):
    x, weight = torch.randn(5, 100).to(dtype), torch.randn(100).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=1e-2, atol=1e-2)
"""


@pytest.mark.timeout(300)
def test_no_dtype_gets_another_s_code(tmp_path: Path) -> None:
    """As two processes once left it that were started at once: neither may any more, and what is left does no harm."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first = run_apart(_TWO_DTYPES, environment)
    assert first.stdout.count("kept by one writer") == 2 and "compiled anew" not in first.stderr
    one, other = tmp_path.rglob("*.nbc")
    one.rename(tmp_path / "kept")
    other.rename(one)
    (tmp_path / "kept").rename(other)
    assert run_apart(_TWO_DTYPES, environment).stderr.count("compiled anew") == 1


def run_apart(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What Numba and OpenMP are told, they are told before they are loaded."""
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run


def test_kernels_are_kept_where_only_we_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_cache.use_cache()
    folders.append(Path(numba.config.CACHE_DIR))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    assert kernel_cache.use_cache()
    folders.append(Path(numba.config.CACHE_DIR))
    assert [folder.parent for folder in folders] == [tmp_path / "xdg" / "intarsia" / "kernels", tmp_path / "own"]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    monkeypatch.setattr("os.geteuid", lambda: 12345)  # as another user finds it
    assert not kernel_cache.use_cache()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/nowhere")
    assert not kernel_cache.use_cache()


def test_kernels_that_nobody_has_used_for_long_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.use_cache()
    ours = Path(numba.config.CACHE_DIR)
    long_ago = time.time() - 31 * 24 * 3600
    others = [ours.parent / name for name in ("0" * 16, "1" * 16, "notes")]
    for folder in others:
        folder.mkdir()
        (folder / "kernel").write_text("")
    for folder in (ours, others[0], others[2]):
        os.utime(folder, (long_ago, long_ago))
    assert kernel_cache.use_cache()
    assert sorted(ours.parent.iterdir()) == sorted([ours, *others[1:]])
    assert ours.stat().st_mtime > long_ago  # it is in use now

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(ours.parent))  # somebody's own
    os.utime(others[1], (long_ago, long_ago))
    assert kernel_cache.use_cache() and others[1].exists()


def test_another_version_of_a_kernel_is_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("one")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    before = kernel_cache._digest()
    assert before == kernel_cache._digest()
    (tmp_path / "a.py").write_text("two")
    assert before != kernel_cache._digest()


def test_another_machine_s_kernels_are_kept_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be a volume that several mount."""
    here = kernel_cache._digest()
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another")
    assert kernel_cache._digest() != here
