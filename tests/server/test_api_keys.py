"""API keys with names and limits, as a file has them; and what a wrong line is told, which is never the key."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from runner.config import ClientLimits
from server.api_keys import ApiKey, parse_key
from server.cli import build_parser
from server.config import ServerConfig
from server.flag_types import key_file
from server.serve_command import build_config


def test_a_key_alone_is_what_it_was() -> None:
    assert parse_key("sk-1:2=3", 4) == ApiKey("sk-1:2=3", "key-5", ClientLimits())


def test_a_key_with_settings() -> None:
    key = parse_key("sk-1  name=team.a@x concurrency=3\trequests=60 tokens=100000")
    assert key == ApiKey("sk-1", "team.a@x", ClientLimits(3, 60, 100000))


@pytest.mark.parametrize(
    "settings",
    [
        "else",
        "=",
        "name=",
        "name=a/b",
        "limit=3",
        "tokens=0",
        "tokens=-1",
        "tokens=1.5",
        "tokens=²",
        "requests=" + "9" * 5000,
    ],
)
def test_what_is_wrong_is_told_without_the_key(settings: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as told:
        parse_key(f"sk-secret {settings}")
    assert "secret" not in str(told.value) and len(str(told.value)) < 100
    (tmp_path / "keys").write_text(f"sk-good name=a\nsk-secret {settings}\n")
    with pytest.raises(argparse.ArgumentTypeError) as told_too:
        key_file(str(tmp_path / "keys"))
    assert "secret" not in str(told_too.value)


def test_each_key_s_limits_go_before_the_server_s(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nsk-1 name=a tokens=9\n\nsk-2\n")
    flags = f"serve --api-key-file {tmp_path / 'keys'} --api-key sk-3 --tokens-per-minute 7 --max-concurrency-per-key 2"
    config = build_config(build_parser().parse_args([*flags.split(), "--requests-per-minute", "5K"]))
    assert [key.secret for key in config.keys] == ["sk-1", "sk-2", "sk-3"]
    assert [key.name for key in config.keys] == ["a", "key-2", "key-3"]
    default = ClientLimits(2, 5000, 7)
    assert config.key_limits == (ClientLimits(2, 5000, 9), default, default)
    assert config.runner_config("ipc://x").clients == config.key_limits


def test_without_keys_everybody_is_one_client() -> None:
    assert ServerConfig(requests_per_minute=3).key_limits == (ClientLimits(requests_per_minute=3),)
