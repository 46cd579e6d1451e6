"""Turns what the operator left open into numbers: device, dtype, context length, slots, token budget, KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from runner.config import RunnerConfig
from runner.kv_cache import bytes_per_block
from runner.model import Model

CPU_KV_BYTES = 512 << 20
MAX_BLOCKS = 1 << 18
"""Beyond what all slots can use, where there is memory: the host keeps a record of each."""
MIB = 1 << 20


class BadConfiguration(Exception):
    """What was asked for can't be had together. The message names the flag to change."""


@dataclass(frozen=True)
class Limits:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def choose_device(config: RunnerConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadConfiguration("--device cuda: torch finds no CUDA device")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(config: RunnerConfig, hf_config: PretrainedConfig) -> torch.dtype:
    """ "auto" is the checkpoint's own dtype, but bfloat16 for a float32 checkpoint on CUDA."""
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    dtype: torch.dtype = getattr(hf_config, "dtype", None) or torch.float32
    if dtype == torch.float32 and choose_device(config).type == "cuda":
        return torch.bfloat16
    return dtype


def choose_limits(config: RunnerConfig, max_positions: int, device: torch.device) -> Limits:
    """`max_positions`: what the model was made for. Raises `BadConfiguration`."""
    cuda = device.type == "cuda"
    max_model_len = config.max_model_len or max_positions
    if max_model_len > max_positions:
        raise BadConfiguration(
            f"--max-model-len {max_model_len} is more than the model's own {max_positions} positions"
        )
    max_num_seqs = config.max_num_seqs or (256 if cuda else 64)
    max_num_batched_tokens = config.max_num_batched_tokens or max(max_num_seqs, 8192 if cuda else 512)
    if max_num_batched_tokens < max_num_seqs:
        raise BadConfiguration(
            f"--max-num-batched-tokens {max_num_batched_tokens} must be at least --max-num-seqs {max_num_seqs}"
        )
    return Limits(max_model_len, max_num_seqs, max_num_batched_tokens)


def choose_num_blocks(config: RunnerConfig, model: Model, limits: Limits, reserve: int) -> int:
    """KV blocks, the dummy included.

    Args:
        reserve: bytes of device memory that a step needs beyond weights and cache (CUDA only).

    Raises:
        BadConfiguration: not even one request of max_model_len would fit.
    """
    block = bytes_per_block(model.kv_shapes, config.block_size, model.dtype)
    if config.kv_cache_memory_bytes is not None:
        budget, flag = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    elif model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        budget, flag = int(total * config.gpu_memory_utilization) - (total - free) - reserve, "--gpu-memory-utilization"
    else:
        budget, flag = CPU_KV_BYTES, "--kv-cache-memory-bytes"
    per_seq = -(-limits.max_model_len // config.block_size)
    all_slots = limits.max_num_seqs * per_seq + 1
    # What slots can't use keeps prefixes, but on a CPU only where it was asked for: the memory is everybody's.
    spare = model.device.type == "cuda" or config.kv_cache_memory_bytes is not None
    num_blocks = min(budget // block, max(all_slots, MAX_BLOCKS) if spare else all_slots)
    if num_blocks < per_seq + 1:
        raise BadConfiguration(
            f"one request of --max-model-len {limits.max_model_len} needs {(per_seq + 1) * block / MIB:.0f} MiB of KV "
            f"cache and there are {max(budget, 0) / MIB:.0f} MiB: raise {flag} or lower --max-model-len"
        )
    return int(num_blocks)
