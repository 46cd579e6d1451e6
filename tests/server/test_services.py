"""What the routes work with, loaded from a model's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from server.services import Services
from tests.models import EOS_ID, Family
from tests.server.fakes import MODEL, FakeEngine, RecordsHarness, ids_of, say


def test_load(tiny_model: Callable[[Family], Path]) -> None:
    model = msgspec.structs.replace(MODEL, path=str(tiny_model("llama")))
    loaded = Services.load(FakeEngine(say("")), model, RecordsHarness().responses, served_model_names=["a", "b"])
    assert loaded.defaults.eos_token_ids == (EOS_ID,)
    assert loaded.served_model_names == ("a", "b")
    assert asyncio.run(loaded.tokenizer.encode("answer", add_special_tokens=True)) == ids_of("answer")
    assert asyncio.run(loaded.chat_template.render([{"role": "user", "content": "x"}])).startswith("<bos>")


def test_the_operators_choices(tiny_model: Callable[[Family], Path], tmp_path: Path) -> None:
    model = msgspec.structs.replace(MODEL, path=str(tiny_model("llama")))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    loaded = Services.load(
        FakeEngine(say("")),
        model,
        RecordsHarness().responses,
        served_model_names=["a"],
        chat_template="{{ 'mine' }}",
        generation_config=str(tmp_path),
    )
    assert loaded.defaults.temperature == 0.25
    assert asyncio.run(loaded.chat_template.render([{"role": "user", "content": "x"}])) == "mine"


def test_the_fingerprint_follows_the_model() -> None:
    from tests.server.fakes import services

    engine = FakeEngine(say(""))
    other = msgspec.structs.replace(MODEL, dtype="bfloat16")
    assert services(engine).system_fingerprint == services(engine).system_fingerprint
    assert services(engine).system_fingerprint != services(engine, model=other).system_fingerprint


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    model = msgspec.structs.replace(MODEL, path=str(tmp_path))
    with pytest.raises((ValueError, OSError)):
        Services.load(FakeEngine(say("")), model, RecordsHarness().responses, served_model_names=["a"])
