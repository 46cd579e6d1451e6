"""Folders of the two models that the serving figures are measured with: the shapes of Qwen3-0.6B and Llama-3.1-8B,
without weights (`--load-format dummy` makes random ones). Written by `bench_serve`.

The tokenizer is byte-level, as those of the real models are, so that detokenising costs what it does there; its
entries are the 256 bytes and made-up words up to the model's vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
_SHARED = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_QWEN = {
    **_SHARED,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40_960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
_LLAMA = {
    **_SHARED,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}


@dataclass(frozen=True)
class BenchModel:
    """A shape, and the concurrencies that it is measured at."""

    name: str
    config: dict[str, Any]
    middle: int
    """The concurrency between 1 and 256."""

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def write(self, parent: Path) -> Path:
        """A Hugging Face folder below `parent`."""
        folder = parent / self.name
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "config.json", self.config)
        _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
        write_tokenizer(folder, self.vocab_size)
        return folder


MODELS = {
    "qwen": BenchModel("Qwen3-0.6B-shape", _QWEN, 64),
    "llama": BenchModel("Llama-3.1-8B-shape", _LLAMA, 32),
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE without merges: any text is bytes to it, and every id has a text of its own."""
    names = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"Ġt{index}" for index in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write(folder / "tokenizer_config.json", {**kind, **special, "model_max_length": 131_072})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
