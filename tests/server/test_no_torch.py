"""Without torch the tokenizer is the same one, of the same class. (`integration.test_answers` looks at a server.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.models import build_tokenizer
from tests.server.harness import ROOT

# Prints each folder's tokenizer: its class and all of its state.
PROGRAM = """
import json, sys
from pathlib import Path
from server.no_torch import keep_torch_out
keep_torch_out()
from server.tokenizer import Tokenizer
found = []
for folder in json.loads(sys.argv[1]):
    loaded = Tokenizer.load(Path(folder)).transformers
    found.append([type(loaded).__name__, loaded.backend_tokenizer.to_str()])
assert not [name for name in sys.modules if name.startswith("torch.")]
print(json.dumps(found))
"""

# (model_type, tokenizer_class) as published models have them; transformers chooses by both.
KINDS = [
    ("llama", "PreTrainedTokenizerFast"),
    ("llama", "LlamaTokenizerFast"),
    ("llama", "TokenizersBackend"),
    ("qwen3", "Qwen2Tokenizer"),
    ("gemma3_text", "GemmaTokenizerFast"),
    ("gpt2", "GPT2Tokenizer"),
    ("mistral", "LlamaTokenizer"),
    ("phi3", None),
]


def save(folder: Path, model_type: str, tokenizer_class: str | None) -> Path:
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.filterwarnings("ignore")  # what transformers thinks of these combinations is not the point
def test_the_same_tokenizer(tmp_path: Path) -> None:
    folders = [save(tmp_path / str(index), *kind) for index, kind in enumerate(KINDS)]
    arguments = json.dumps([str(folder) for folder in folders])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert "PyTorch" not in ran.stderr
    for kind, folder, (name, state) in zip(KINDS, folders, json.loads(ran.stdout), strict=True):
        expected = AutoTokenizer.from_pretrained(folder)
        expected.backend_tokenizer.no_padding()
        expected.backend_tokenizer.no_truncation()
        assert name == type(expected).__name__, kind
        assert state == expected.backend_tokenizer.to_str(), kind
