"""The parts of `make gpu-bench-serve` that need no GPU: its model folders, its points, and that it leaves nothing
running."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import transformers

from server.tokenizer import Tokenizer
from tests.gpu import server_process
from tests.gpu.bench_models import MODELS, write_tokenizer
from tests.gpu.bench_serve import Load, default_points
from tests.gpu.server_process import running_server
from tests.server.harness import eventually, is_alive

# A stand-in for the server: starts what it takes for a runner, which ignores the end of its standard input.
SERVER = """
import subprocess, sys, time
runner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "runner"], start_new_session=True)
print(runner.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", MODELS)
def test_folders_are_those_of_the_models(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    folder = model.write(tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.model_type == model.config["model_type"]
    parameters = {"qwen": 0.6e9, "llama": 8.0e9}[name]
    assert num_parameters(config) == pytest.approx(parameters, rel=0.02)


def num_parameters(config: transformers.PretrainedConfig) -> int:
    """Of a decoder with grouped-query attention and a gated MLP, but for its norms."""
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    tables = 1 if config.tie_word_embeddings else 2
    return int(config.num_hidden_layers * layer + tables * config.vocab_size * config.hidden_size)


def test_every_id_has_a_text_of_its_own(tmp_path: Path) -> None:
    """And is decoded as the real models' are: exactly, by bytes."""
    write_tokenizer(tmp_path, 1000)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocabulary.is_exact
    assert len({tokenizer.vocabulary.bytes_of(token) for token in range(1000)}) == 1000
    assert tokenizer.decode([300, 999], skip_special_tokens=True) == " t300 t999"
    tokenizer.close()


def test_points() -> None:
    assert default_points(MODELS["qwen"]) == [Load.parse(text) for text in ("1", "64", "256", "1e", "64e")]
    assert [Load.parse(text).num_requests for text in ("1", "32", "64e", "256")] == [12, 160, 320, 1024]
    assert [Load(width).num_procs for width in (1, 32, 256)] == [1, 4, 4]


def test_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "RUNNER_SECONDS", 0.2)
    log = tmp_path / "log"
    with pytest.raises(ZeroDivisionError), running_server([sys.executable, "-c", SERVER], log) as server:
        runner = int(eventually(log.read_text))
        assert is_alive(runner)
        raise ZeroDivisionError
    assert server.poll() is not None
    eventually(lambda: not Path(f"/proc/{runner}").exists() or not is_alive(runner))
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
