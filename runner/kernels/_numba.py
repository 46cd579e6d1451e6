"""Numba for the CPU's kernels (`*_cpu.py`): memory by address, the three dtypes, and a team of threads.

A kernel is an `@njit` function of integers and floats. Tensors are passed as addresses, which costs a tenth of what a
NumPy array around each of them does; `rows` makes an array of one again. Its first argument is a tag whose type says
what lies at these addresses: uint16 is bfloat16, int16 float16 and float32 itself, so each kernel is compiled once a
dtype that is asked for, and is kept on disk (`kernel_cache`).

A kernel runs in the threads that torch's own operators run in. A second pool beside torch's would have both spin for
each other's cores.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import NullCache
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from torch import Tensor

from runner.kernels.kernel_cache import one_writer, use_cache

log = logging.getLogger(__name__)

_I32 = ir.IntType(32)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()

_FLOAT16 = {"x86_64": "avx512fp16", "aarch64": "fullfp16"}
"""The instructions that compute in float16."""


def _leave_out_float16() -> None:
    """Where a processor computes in float16, LLVM does so with what is rounded to it in between, and fuses that: the
    kernels would no longer do what torch does. Elsewhere it computes in float32, as is meant. To be called before
    anything is compiled."""
    name = _FLOAT16.get(platform.machine())
    if name is not None and numba.config.CPU_FEATURES is None:
        numba.config.CPU_FEATURES = ",".join(filter(None, (get_host_cpu_features(), f"-{name}")))


_leave_out_float16()

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be taken in any order; infinities and NaN stay what they are."""
kernel = functools.partial(njit, cache=use_cache(), fastmath=FAST, error_model="numpy", boundscheck=False)
long_kernel = functools.partial(kernel, nogil=True)
"""For what may take milliseconds: other threads go on meanwhile."""
helper = functools.partial(njit, fastmath=FAST, error_model="numpy", boundscheck=False, inline="never")

_TAGS = {torch.bfloat16: types.uint16, torch.float16: types.int16, torch.float32: types.float32}
DTYPES = tuple(_TAGS)


class Kernel:
    """A kernel's entry points by dtype, without what Numba does to find the one that fits."""

    def __init__(self, function: Any, arguments: str) -> None:
        """`arguments`: of the function behind its tag, a letter each: i (int64) or f (float64)."""
        self._function = function
        self._arguments = tuple(types.int64 if letter == "i" else types.float64 for letter in arguments)
        self._entries: dict[torch.dtype, Callable[..., None]] = {}
        cache = function._cache
        if not isinstance(cache, NullCache):
            cache.save_overload = one_writer()(cache.save_overload)

    def __call__(self, dtype: torch.dtype, *arguments: float) -> None:
        entry = self._entries.get(dtype)
        if entry is None:
            entry = self.compile(dtype)
        entry(0, *arguments)

    def compile(self, dtype: torch.dtype) -> Callable[..., None]:
        """Takes a second, or some milliseconds where the kernel is found on the disk."""
        try:
            entry = self._compile(dtype)
        except Exception as error:  # whatever a full disk or a damaged file makes of the cache
            log.warning("a compiled kernel can't be kept or read, and is compiled anew: %r", error)
            self._function._cache = NullCache()
            entry = self._compile(dtype)
        self._entries[dtype] = entry
        return entry

    def _compile(self, dtype: torch.dtype) -> Callable[..., None]:
        """Raises KeyError where the cache had another dtype's code in this one's place."""
        signature = (_TAGS[dtype], *self._arguments)
        self._function.compile(signature)
        entry: Callable[..., None] = self._function.overloads[signature].entry_point
        return entry


# --- memory -----------------------------------------------------------------------------------------------------------


@intrinsic
def _pointer(typingctx: Any, tag: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return types.CPointer(tag)(tag, types.int64), generate


@helper
def rows(tag: Any, address: int, shape: Any) -> Any:
    """The contiguous array of the tag's type at an address."""
    return carray(_pointer(tag, address), shape)


@intrinsic
def _prefetch_line(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, locality, data = (ir.Constant(_I32, number) for number in (0, 2, 1))
        builder.call(function, [builder.inttoptr(args[0], pointer), read, locality, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@helper
def prefetch(address: int, size: int) -> None:
    """Has so many bytes brought to the second cache, without waiting for them."""
    for offset in range(0, size, 64):
        _prefetch_line(address + offset)


FLOAT, INT, LONG = np.float32(0), np.int32(0), np.int64(0)
"""Tags of what isn't of the model's dtype."""


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _cast(source: Any, target: Any) -> Any:
    @intrinsic
    def bits(typingctx: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return bits


bits_of = _cast(types.float32, types.uint32)
float_of = _cast(types.uint32, types.float32)


@intrinsic
def wide(typingctx: Any, value: Any) -> Any:
    """A stored value as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.uint16:
            bits = builder.zext(args[0], _I32)
            return builder.bitcast(builder.shl(bits, ir.Constant(_I32, 16)), ir.FloatType())
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return args[0]

    return types.float32(value), generate


@intrinsic
def is_bfloat(typingctx: Any, tag: Any) -> Any:
    """Known when compiled: what depends on it costs nothing, but has to have a type for every tag."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(tag == types.uint16))

    return types.boolean(tag), generate


def _rounded_bits(builder: Any, value: Any) -> Any:
    """In integers: LLVM's own conversion is an instruction on few machines, and on the others a function that no
    library here has."""
    bits = builder.bitcast(value, _I32)
    high = builder.lshr(bits, ir.Constant(_I32, 16))
    half = builder.add(ir.Constant(_I32, 0x7FFF), builder.and_(high, ir.Constant(_I32, 1)))
    rounded = builder.lshr(builder.add(bits, half), ir.Constant(_I32, 16))
    quiet = builder.or_(high, ir.Constant(_I32, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), ir.IntType(16))


@intrinsic
def narrow(typingctx: Any, tag: Any, value: Any) -> Any:
    """A float32 as the tag's dtype is stored, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if tag == types.uint16:
            return _rounded_bits(builder, args[1])
        if tag == types.int16:
            return builder.bitcast(builder.fptrunc(args[1], ir.HalfType()), ir.IntType(16))
        return args[1]

    return tag(tag, types.float32), generate


# --- threads ----------------------------------------------------------------------------------------------------------


@functools.cache
def _openmp() -> tuple[int, int, int]:
    """Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads in the OpenMP that torch itself uses;
    zeros where it is another library than GNU's. Kernels then run in the calling thread."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        functions = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (OSError, AttributeError):
        return 0, 0, 0
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)  # type: ignore[return-value]


class _Team:
    """What `fork` needs, at an address: what `_openmp` gives, and the number of threads."""

    def __init__(self) -> None:
        self._words = np.zeros(4, np.int64)
        self.address = self._words.ctypes.data

    def sized(self, threads: int) -> int:
        functions = _openmp()
        self._words[:] = *functions, threads if functions[0] else 1
        return self.address


_team = _Team()


def team() -> int:
    """The address of this process's team: as many threads as torch has."""
    threads = torch.get_num_threads()
    if _team._words[3] != threads:
        _team.sized(threads)
    return _team.address


@intrinsic
def _call_by_all(typingctx: Any, team: Any, body: Any, args: Any) -> Any:
    """GOMP_parallel, called as a compiler calls it for `#pragma omp parallel`."""
    argtypes = (types.int64, types.int64, *args.types)
    typingctx.resolve_function_type(body, argtypes, {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        team_address, _, packed = values
        i32, i64, pointer = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
        words = [
            builder.load(builder.gep(builder.inttoptr(team_address, i64.as_pointer()), [ir.Constant(i64, n)]))
            for n in range(4)
        ]
        members = [*words[1:3], *cgutils.unpack_tuple(builder, packed)]
        struct = cgutils.pack_struct(builder, members)
        place = cgutils.alloca_once_value(builder, struct)
        outlined = _outlined(context, builder.module, body, argtypes, struct.type)
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, i32, i32])
        parallel = builder.inttoptr(words[0], kind.as_pointer())
        threads = builder.trunc(words[3], i32)
        data = builder.bitcast(place, pointer)
        builder.call(parallel, [builder.bitcast(outlined, pointer), data, threads, ir.Constant(i32, 0)])
        return context.get_dummy_value()

    return types.void(team, body, args), generate


def _outlined(context: Any, module: Any, body: Any, argtypes: Any, struct: Any) -> Any:
    """What each thread of the team calls: void (struct *)."""
    pointer = ir.IntType(8).as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), module.get_unique_name("team_body"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    get_number, get_count, *arguments = cgutils.unpack_tuple(
        builder, builder.load(builder.bitcast(function.args[0], struct.as_pointer()))
    )

    def ask(address: Any) -> Any:
        getter = builder.inttoptr(address, ir.FunctionType(ir.IntType(32), []).as_pointer())
        return builder.zext(builder.call(getter, []), ir.IntType(64))

    # As many as there are, which may be fewer than were asked for.
    thread, threads = ask(get_number), ask(get_count)
    compiled = body.dispatcher.overloads[argtypes]
    context.active_code_library.add_linking_library(compiled.library)
    callee = context.declare_function(module, compiled.fndesc)
    context.call_conv.call_function(builder, callee, types.void, argtypes, [thread, threads, *arguments])
    builder.ret_void()
    return function


@functools.partial(njit, fastmath=FAST, error_model="numpy", boundscheck=False, inline="always")
def fork(team: int, body: Any, args: Any) -> None:
    """body(thread, threads, *args) in every thread of the team, at once; returns when all have. `args` are numbers.

    Inlined, lest `body` be passed: that would be the address of an object of this process, and what holds one isn't
    kept on disk."""
    if rows(LONG, team, 4)[3] > 1:
        _call_by_all(team, body, args)
    else:
        body(0, 1, *args)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@helper
def exp(x: Any) -> Any:
    """e to a float32, to within two units in the last place; 0 below -87. Loops over it are vectorised, unlike those
    over the C library's."""
    x = min(max(x, np.float32(-87.3)), np.float32(88.7))
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - whole * np.float32(0.693359375)
    r = r + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


class Scratch:
    """float32 for a kernel's threads to work in, kept from call to call. Kernels are called by one thread only."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, np.float32)
        self._address = self._memory.ctypes.data

    def address(self, values: int) -> int:
        """Of room for so many values for each thread, thread by thread."""
        needed = values * torch.get_num_threads()
        if self._memory.size < needed:
            self._memory = np.zeros(2 * needed, np.float32)
            self._address = self._memory.ctypes.data
        return self._address


def contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


__all__ = [
    "BFLOAT", "DTYPES", "FAST", "FLOAT", "INT", "LONG", "Kernel", "Scratch", "bits_of", "contiguous", "exp", "float_of",
    "fork", "helper", "is_bfloat", "kernel", "long_kernel", "narrow", "prefetch", "rows", "team", "wide",
]  # fmt: skip
