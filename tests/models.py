"""Tiny seeded models and the reference that the tests compare with: Hugging Face's own `generate`.

`build_tiny_model(family, folder)` saves an fp32 model and a tokenizer as a Hugging Face folder; tests take it through
the fixture `tiny_model("llama")`. `hf_generate`, `hf_logits` and `embed` run it in plain eager transformers.

The models must be able to *notice* a mistake: a wrong row, mask or cached block has to change what they say. An
untrained model does not do that by itself. With tied embeddings it repeats its last token whatever its cache holds,
and with the usual small initialisation its attention is so flat that one prompt row in thirty drowns. So the head is
untied, queries and keys are large enough for a peaked attention, and the attention's output outweighs the residual
stream. `test_models.py` holds them to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

Family = Literal["llama", "qwen3", "gemma3", "gemma2"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "gemma3", "gemma2")

VOCAB_SIZE = 384
HIDDEN_SIZE = 64
MAX_POSITIONS = 512
SLIDING_WINDOW = 8
"""Of the Gemma models' sliding layers: shorter than nearly every prompt, so that the window matters."""

PEAK = 1.5
"""Standard deviation of queries' and keys' elements; that of the attention scores is its square."""

PAD, BOS, EOS, TURN = "<pad>", "<bos>", "<eos>", "<turn>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN)
PAD_ID, BOS_ID, EOS_ID, TURN_ID = range(4)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

# What the tokenizer's merges are learned from. Only its statistics matter.
CORPUS = """
Intarsia is the craft of setting pieces of different woods into one surface. The cutter draws a pattern, chooses the
boards for their colour and grain, saws every piece a little too large, and files the edges until no light passes
between them. Where a shadow is wanted the piece is held in hot sand; where a highlight is wanted, in plain maple. When
all the pieces lie together they are glued to one ground, pressed overnight, and planed as if they had grown there.
What is the capital of France? The capital of France is Paris. What is the answer? The answer is in the question.
"""


def _shared(**special: Any) -> dict[str, Any]:
    """The settings that all families have in common."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **special,
    }


def _config(family: Family) -> Any:
    """A config of two to four layers. The head size differs from hidden / heads where the family allows it."""
    if family == "llama":
        return LlamaConfig(**_shared(num_hidden_layers=2, head_dim=16))
    if family == "qwen3":
        return Qwen3Config(**_shared(num_hidden_layers=3, head_dim=32))
    sliding = {"sliding_window": SLIDING_WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32}
    if family == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3TextConfig(**_shared(num_hidden_layers=4, layer_types=layers, **sliding))
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}
    return Gemma2Config(**_shared(num_hidden_layers=3, layer_types=layers, **sliding, **caps))


@torch.no_grad()
def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter from one seeded generator, in the order of their names.

    Our own filling and not the library's: the weights must be the same under every release of it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            # About 1 (Gemma keeps it as an offset from 1, so 0), and no two channels alike.
            centre = 0.0 if "gemma" in type(model).__name__.lower() else 1.0
            parameter.copy_(centre + 0.1 * noise)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(PEAK - 1.0)
        elif "embed_tokens" in name:
            parameter.copy_(noise * 0.5 / math.sqrt(parameter.shape[1]))
        else:
            gain = {"q_proj": PEAK, "k_proj": PEAK, "o_proj": 2.0}.get(name.split(".")[-2], 1.0)
            parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))


def build_tokenizer(more_special: Mapping[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `VOCAB_SIZE` entries: every id that the model can say has a text.
    `more_special`: special tokens by the tokenizer's attribute."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *(more_special or {}).values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": dict(more_special)} if more_special else {}),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tiny_model(family: Family, folder: Path, *, seed: int = 0) -> Path:
    """Save the family's tiny model (fp32), its generation config and its tokenizer in `folder`; returns it."""
    model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    _initialise(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


def clear_prompt(path: Path, length: int, seed: int, max_new_tokens: int = 32) -> list[int]:
    """A random prompt whose greedy continuation is nowhere a near tie, so that rounding can't decide a token.

    About one continuation in thirty comes within `TIE` of one; a batch that adds in another order may then differ.
    """
    for attempt in range(100):
        prompt = random_prompt(length, seed + 1_000_003 * attempt)
        tokens = hf_generate(path, prompt, max_new_tokens)
        best = hf_logits(path, prompt + tokens)[length - 1 : -1].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > TIE:
            return prompt
    raise AssertionError("no clear prompt in a hundred: the model's logits are degenerate")


TIE = 1e-3
"""Logits closer than this (their standard deviation is about 1) count as a tie; rounding in fp32 is below 1e-5."""


@functools.lru_cache(maxsize=8)
def hf_model(path: Path) -> Any:
    """The folder's model in plain eager transformers, fp32, on the CPU. Loaded once; never change it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def embed(path: Path, ids: Sequence[int]) -> torch.Tensor:
    """The rows of these ids, after any scaling, as a client would send them: [len(ids), hidden], fp32."""
    table: Callable[[torch.Tensor], torch.Tensor] = hf_model(path).get_input_embeddings()
    return table(torch.tensor(ids)).clone()


@torch.inference_mode()
def hf_generate(
    path: Path, prompt: Sequence[int] | torch.Tensor, max_new_tokens: int = 32, *, ignore_eos: bool = True
) -> list[int]:
    """Greedy tokens after `prompt`: token ids, or rows [n, hidden]. The ending token, if any, is among them."""
    model = hf_model(path)
    options = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": None if ignore_eos else model.generation_config.eos_token_id,
        "pad_token_id": PAD_ID,
    }
    if isinstance(prompt, torch.Tensor):
        rows = prompt[None]
        mask = torch.ones(rows.shape[:2], dtype=torch.long)
        output = model.generate(inputs_embeds=rows, attention_mask=mask, **options)
        return [int(token) for token in output[0]]
    ids = torch.tensor([list(prompt)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [int(token) for token in output[0, len(prompt) :]]


@torch.inference_mode()
def hf_logits(path: Path, prompt: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """The logits at every row of `prompt` (token ids, or rows [n, hidden]): [n, vocab], fp32."""
    model = hf_model(path)
    if isinstance(prompt, torch.Tensor):
        logits: torch.Tensor = model(inputs_embeds=prompt[None], use_cache=False).logits
    else:
        logits = model(torch.tensor([list(prompt)]), use_cache=False).logits
    return logits[0]


@torch.inference_mode()
def hf_hidden(path: Path, prompt: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """The last hidden states, behind the final norm, of `prompt` (ids, or rows [n, hidden]): [n, hidden], fp32."""
    body = hf_model(path).base_model
    if isinstance(prompt, torch.Tensor):
        hidden: torch.Tensor = body(inputs_embeds=prompt[None], use_cache=False).last_hidden_state
    else:
        hidden = body(torch.tensor([list(prompt)]), use_cache=False).last_hidden_state
    return hidden[0]
