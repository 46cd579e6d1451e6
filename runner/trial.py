"""What is tried once, at load: which attention backend, that the head is the model's own, and what a full step needs.

Called by `Engine.load` before the KV cache exists.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from runner.attention.backend import AttentionBackend, AttentionBatch
from runner.config import RunnerConfig
from runner.kv_cache import KVCache
from runner.limits import BadConfiguration, Limits
from runner.model import Model


def make_backend(config: RunnerConfig, model: Model) -> AttentionBackend:
    name = config.attention_backend
    if name == "auto":
        name = "triton" if model.device.type == "cuda" else "sdpa"
    if name == "triton":
        if model.device.type != "cuda":
            raise BadConfiguration("--attention-backend triton needs a CUDA device")
        from runner.attention.triton_attention import TritonAttention

        return TritonAttention()
    from runner.attention.sdpa import SdpaAttention

    return SdpaAttention()


def check_and_measure(
    model: Model, hf: PreTrainedModel, backend: AttentionBackend, limits: Limits, block_size: int
) -> int:
    """Checks the model's head on a few rows and, on CUDA, returns the bytes that the largest step takes beyond weights
    and cache."""
    cuda = model.device.type == "cuda"
    rows = 8
    model.check_head(hf, trial_batch(model, backend, rows, block_size))
    if not cuda:
        return 0
    rows = limits.max_num_batched_tokens
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    with torch.inference_mode():
        batch = trial_batch(model, backend, rows, block_size)
        token_ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        hidden = model.forward(model.embed(token_ids), batch.positions, batch)
        # Raw logits, a filtered copy and the sampler's temporaries.
        logits = model.logits(hidden[: limits.max_num_seqs])
        peak = torch.cuda.max_memory_allocated(model.device) - before
        peak = max(peak, 6 * logits.nbytes)
    del batch, token_ids, hidden, logits
    torch.cuda.empty_cache()
    state = limits.max_num_seqs * limits.max_model_len * 4 + 2 * rows * model.hidden_size * model.dtype.itemsize
    return int(peak * 1.1) + state + (512 << 20)


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
    )
