"""What is tried once, at load: which attention backend, that the model computes what transformers' own does, fused or
not, and what a full step needs.

Called by `Engine.load` (and `runner.verify`) before the KV cache exists.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch

from runner.attention.backend import AttentionBackend, AttentionBatch
from runner.config import RunnerConfig
from runner.fusion import NotFusable, fuse
from runner.kv_cache import KVCache
from runner.limits import BadConfiguration, Limits
from runner.model import Model, UnsupportedModel, load_model, refuse_moving_rope

log = logging.getLogger(__name__)

TRIAL_ROWS = 8
PREFILL_SECONDS = 0.03
"""How long the prompts in a step may hold up the sequences that decode in it: with the decodes themselves that stays
below 40 ms from token to token."""
_CHUNK_STEP = 256
CPU_CHUNK = 64
"""On a CPU, where so many rows are work enough for the cores: all of a step's 512 make 3 % more tokens at concurrency
8 and 7 % at 32, and those who read wait six times as long (docs/load_testing.md)."""


def make_backend(config: RunnerConfig, model: Model) -> AttentionBackend:
    """Raises BadConfiguration where the one that was asked for can't run here."""
    name, on_cuda = config.attention_backend, model.device.type == "cuda"
    if name == "sdpa":
        from runner.attention.sdpa import SdpaAttention

        return SdpaAttention()
    if name == "auto" and not on_cuda:
        from runner.attention.cpu_attention import CpuAttention

        return CpuAttention()
    if not on_cuda:
        raise BadConfiguration(f"--attention-backend {name} needs a CUDA device")
    from runner.attention import flash_attention_3
    from runner.attention.triton_attention import TritonAttention

    operators = None
    if name != "triton" and flash_attention_3.fits(model.device, model.dtype):
        operators = flash_attention_3.load_operators()
    if operators is not None:
        return flash_attention_3.FlashAttention3(operators)
    if name == "fa3":
        raise BadConfiguration(
            "--attention-backend fa3 needs a Hopper GPU, a model in bfloat16 or float16, and FlashAttention 3 "
            "(pip install 'intarsia[fa3]')"
        )
    return TritonAttention()


def load_checked(
    config: RunnerConfig, path: str, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> tuple[Model, AttentionBackend]:
    """Loads the model, checks that it is driven rightly, and fuses its layers where their kind is known.

    Raises:
        UnsupportedModel, BadConfiguration: fit for the operator.
    """
    hf = load_model(config, path, device, dtype)
    try:
        model = Model(hf, path)
        backend = make_backend(config, model)
        batch = trial_batch(model, backend, min(TRIAL_ROWS, max_model_len), config.block_size)
        model.check_head(hf, batch)
        model.check_attention(hf, batch)
    except (UnsupportedModel, BadConfiguration, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever modules raise that aren't made for this
        log.warning("the trial of %s failed", type(hf).__name__, exc_info=True)
        raise UnsupportedModel(f"{type(hf).__name__} can't be driven by this server: {error}") from error
    try:
        model.adopt(fuse(hf, max_model_len), max_model_len, batch)
    except NotFusable as reason:
        refuse_moving_rope(model.config)
        log.warning("%s runs unfused, as transformers wrote it: %s", type(hf).__name__, reason)
    del hf
    model.pack()
    return model, backend


@dataclass(frozen=True)
class LargestStep:
    """What a step of max_num_batched_tokens rows was seen to need."""

    reserve: int = 0
    """Bytes of device memory beyond weights and cache."""
    chunk: int = CPU_CHUNK
    """Prompt rows that a step in which others decode may have: as many as take PREFILL_SECONDS."""


def measure(model: Model, backend: AttentionBackend, limits: Limits, block_size: int, *, captured: bool) -> LargestStep:
    """On CUDA; elsewhere nothing is known beforehand. `captured`: whether steps will be captured in graphs."""
    if model.device.type != "cuda":
        return LargestStep()
    rows = limits.max_num_batched_tokens
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    with torch.inference_mode():
        batch = trial_batch(model, backend, rows, block_size)
        token_ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        # The first time compiles kernels; the last one is timed.
        for each in ([as_captured(batch, limits)] if captured else []) + [batch, batch]:
            torch.cuda.synchronize(model.device)
            started = time.perf_counter()
            hidden = model.forward(model.embed(token_ids), batch.positions % limits.max_model_len, each)
            torch.cuda.synchronize(model.device)
            seconds = time.perf_counter() - started
        if model.vision is not None:
            model.vision.encode_largest(limits.max_model_len)
        # Raw logits, a filtered copy and the sampler's temporaries.
        logits = model.logits(hidden[: limits.max_num_seqs]).float()
        forward = torch.cuda.max_memory_allocated(model.device) - before
        peak = max(forward, 6 * logits.nbytes)
        if captured:  # graphs keep theirs; a step that none of them serves (a scored prompt's) needs it once more
            peak += forward
    del batch, token_ids, hidden, logits
    torch.cuda.empty_cache()
    state = limits.max_num_seqs * limits.max_model_len * 4 + 3 * rows * model.hidden_size * model.dtype.itemsize
    chunk = int(rows * PREFILL_SECONDS / seconds) // _CHUNK_STEP * _CHUNK_STEP
    return LargestStep(int(peak * 1.1) + state + (512 << 20), min(max(chunk, _CHUNK_STEP), rows))


def as_captured(batch: AttentionBatch, limits: Limits) -> AttentionBatch:
    """`trial_batch`'s one chunk as a graph for mixed steps counts it: so many entries, any but the last a decode, of
    any length. What attention keeps for each of them is memory, too."""
    entries, device = limits.max_num_seqs, batch.positions.device
    starts = torch.full((entries + 1,), len(batch.positions), dtype=torch.int32, device=device)
    starts[0] = 0
    seq_lens = torch.zeros(entries, dtype=torch.int32, device=device)
    seq_lens[0] = len(batch.positions)
    return replace(
        batch,
        entry_slots=torch.zeros_like(starts),
        entry_starts=starts,
        seq_lens=seq_lens,
        num_entries=entries,
        num_decodes=entries - 1,
        max_seq_len=limits.max_model_len,
    )


def trial_batch(model: Model, backend: AttentionBackend, rows: int, block_size: int) -> AttentionBatch:
    """One sequence of `rows` rows, all in one prefill, over a cache of its own."""
    blocks = -(-rows // block_size)
    cache = KVCache(model.kv_shapes, blocks + 1, block_size, model.dtype, model.device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=model.device)

    positions = torch.arange(rows, device=model.device)
    return AttentionBatch(
        backend=backend,
        key_caches=cache.keys,
        value_caches=cache.values,
        block_table=torch.arange(1, blocks + 1, dtype=torch.int32, device=model.device)[None],
        entry_slots=ints(0, 0),
        entry_starts=ints(0, rows),
        seq_lens=ints(rows),
        positions=positions,
        cache_index=positions + block_size,
        num_entries=1,
        num_decodes=0,
        max_seq_len=rows,
        host_starts=[0, rows],
        host_seq_lens=[rows],
        attend_until=(positions + 1).int() if model.two_way else None,
    )
