"""`intarsia verify`: it passes where it should, and says what is wrong where something is."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import block_hash, verify
from runner.config import RunnerConfig
from runner.kernels import prepare
from runner.limits import BadConfiguration
from runner.model import UnsupportedModel
from runner.verify import SETTINGS, Cell, Expected, Setting, run_verify
from tests.models import Family, hf_generate
from tests.parity.mutate import rewrite

TinyModel = Callable[[Family], Path]


def config(path: Path, **settings: Any) -> RunnerConfig:
    return RunnerConfig(model=str(path), device="cpu", **settings)


@pytest.fixture
def two_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on, and everything on. All of them take longer."""
    monkeypatch.setattr(verify, "SETTINGS", [SETTINGS[0], SETTINGS[-1]])


def run(config: RunnerConfig) -> tuple[bool, list[str]]:
    """(passed, lines)."""
    out = io.StringIO()
    return verify.verify(config, out), out.getvalue().splitlines()


def table(lines: list[str]) -> list[list[str]]:
    """The table's rows, without its head."""
    rows = [[cell for cell in line.split("  ") if cell] for line in lines]
    (head,) = [i for i, row in enumerate(rows) if row and row[0].strip() == "overlap"]
    return [[cell.strip() for cell in row] for row in rows[head + 1 : rows.index([], head)]]


def test_a_right_engine_passes(tiny_model: TinyModel, two_settings: None) -> None:
    path = tiny_model("gemma3")
    passed, lines = run(config(path))
    assert passed
    plain, loaded = table(lines)
    assert plain[:4] == ["no", "no", "no", "no"]
    assert loaded[:2] == ["yes", "yes"]
    # What the row is about did happen.
    assert int(loaded[2].removesuffix("×")) > 0
    assert int(loaded[3].removesuffix(" rows")) > 0
    assert plain[4:] == loaded[4:] == ["ok"] * 6
    assert lines[0] == f"{path}, float32 on cpu: asking transformers"
    assert lines[-1] == "PASSED: 57 answers, 57 equal, 0 ties, 0 wrong"


def test_any_three_settings_meet() -> None:
    values = [astuple(setting) for setting in SETTINGS]
    for three in itertools.combinations(range(4), 3):
        assert {tuple(row[i] for i in three) for row in values} == set(itertools.product((False, True), repeat=3))
    assert SETTINGS[0] == Setting(False, False, False, False)
    assert SETTINGS[-1] == Setting(True, True, True, True)


@pytest.mark.long
def test_the_whole_table_passes(tiny_model: TinyModel) -> None:
    passed, lines = run(config(tiny_model("qwen3")))
    assert passed
    assert [row[4:] for row in table(lines)] == [["ok"] * 6] * 8


def test_low_precision_passes_with_ties_at_most(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SETTINGS", SETTINGS[-1:])
    passed, lines = run(config(tiny_model("llama"), dtype="bfloat16"))
    assert passed
    assert ", bfloat16 on cpu" in lines[0]
    assert ", 0 wrong" in lines[-1]
    assert {cell.split("@")[0] for row in table(lines) for cell in row[4:]} <= {"ok", "tie"}


def test_the_reference_is_transformers(tiny_model: TinyModel) -> None:
    """Its tokens are `generate`'s, and its preferences are differences of logits."""
    path = tiny_model("gemma2")
    expected = verify.make_reference(config(path), str(path), torch.device("cpu"), torch.float32)
    assert [len(one.ids) for one in expected] == list(verify.LENGTHS)
    for one in expected[:3]:
        assert one.tokens == hf_generate(path, one.ids)
        assert hf_generate(path, one.rows) == one.tokens
        for position, token in enumerate(one.tokens):
            assert one.gap(position, token) == 0
            assert min(one.best[position].values()) == 0


def test_the_models_generation_settings_are_left_out(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repetition penalty or an ending token would make another answer of the reference's."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), path)
    settings = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 5.0, "eos_token_id": list(range(384))}
    (path / "generation_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(verify, "SETTINGS", SETTINGS[:1])
    monkeypatch.setattr(verify, "KINDS", ("ids",))
    assert run(config(path))[0]


def test_a_wrong_mask_is_told(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SETTINGS", SETTINGS[-1:])
    rewrite(
        monkeypatch,
        prepare,
        "prepare_inputs_reference",
        ("out.is_token_ids[:num_rows] = ids >= 0", "pass"),
    )
    passed, lines = run(config(tiny_model("llama")))
    assert not passed
    assert [row[4:] for row in table(lines)] == [["ok", "ok", "MASK", "MASK", "MASK", "MASK"]]
    assert lines[-1].startswith("FAILED")
    assert any(line.startswith("MASK: ") for line in lines)


def test_a_wrong_answer_is_told(tiny_model: TinyModel, two_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings that share blocks with other embeddings: seen only where something is cached."""
    rewrite(
        monkeypatch,
        block_hash.BlockHashes,
        "extend",
        ("link.update(row_digests[first:first + embeddings * DIGEST_BYTES])", "pass"),
    )
    passed, lines = run(config(tiny_model("llama")))
    assert not passed
    plain, loaded = table(lines)
    assert plain[4:] == ["ok"] * 6
    # "×1" has an older neighbour, to be preempted by.
    assert [cell.split("@")[0] for cell in loaded[4:8]] == ["ok", "ok", "FAIL", "FAIL"]
    assert sum(" and not " in line for line in lines) in range(1, verify.SHOWN + 1)


def test_near_ties_are_not_wrong() -> None:
    best = [{5: 0.0, 6: 0.01, 7: 0.4}, {1: 0.0, 2: 0.3}]
    one = Expected([1, 2, 3], torch.zeros(3, 2), [5, 1], best)
    for tokens, ties, wrong in (
        ([5, 1], [], []),
        ([6, 9], [0], []),  # What comes after a difference is an answer to another question.
        ([7, 1], [], [0]),
        ([99, 1], [], [0]),  # Worse than any of the best.
        ([5, 2], [], [1]),
    ):
        cell = Cell()
        verify._compare(one, tokens, 0.05, cell)
        assert [tie.position for tie in cell.ties] == ties
        assert [difference.position for difference in cell.wrong] == wrong
        assert cell.passed == (not wrong)
        assert str(cell) == (f"FAIL@{wrong[0]}" if wrong else f"tie@{ties[0]}" if ties else "ok")


# --- what it refuses ------------------------------------------------------------------------------------------------


def test_random_weights_are_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(BadConfiguration, match="--load-format dummy"):
        run(config(tiny_model("llama"), load_format="dummy"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedModel, match="can't read the configuration"):
        run(config(tmp_path))
    assert run_verify(config(tmp_path)) == 3
    assert "can't read the configuration" in capsys.readouterr().err
    assert run_verify(config(tmp_path / "mistyped")) == 3
    assert "there is no such folder" in capsys.readouterr().err


def test_the_exit_status_says_it(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for result, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(verify, "verify", lambda config, out, result=result: result)
        assert run_verify(config(tiny_model("llama"))) == status


def test_it_is_a_program(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "runner.verify", config(tmp_path).to_json()], capture_output=True, text=True, check=False
    )
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1].startswith("intarsia: can't read the configuration")
