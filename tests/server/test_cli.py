"""The command line: what the flags mean, that each says its default, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from runner.config import RunnerConfig
from server.cli import build_parser, main
from server.config import DEFAULT_MODEL_NAME, ServerConfig
from server.serve_command import add_arguments, build_config


def config_of(*flags: str) -> ServerConfig:
    return build_config(build_parser().parse_args(["serve", *flags]))


def usage_error(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        config_of(*flags)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_no_flags_are_the_defaults() -> None:
    assert config_of() == ServerConfig()


def test_the_defaults_are_the_runners_own() -> None:
    assert ServerConfig().runner_config("ipc://x") == RunnerConfig(address="ipc://x")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("/models/mine", {"model": "/models/mine"}),
        ("--host 0.0.0.0 --port 8123", {"host": "0.0.0.0", "port": 8123}),
        ("--api-key a --api-key b", {"api_keys": ("a", "b")}),
        ("--served-model-name a b --served-model-name c", {"served_model_name": ("a", "b", "c")}),
        ("--max-json-bytes 3Mi", {"max_json_bytes": 3 << 20}),
        ("--max-body-bytes 5Mi --shutdown-timeout 1.5", {"max_body_bytes": 5 << 20, "shutdown_timeout": 1.5}),
        (
            f"--chat-template {__file__} --generation-config none",
            {"chat_template": __file__, "generation_config": "none"},
        ),
        ("--no-enable-prompt-embeds", {"enable_prompt_embeds": False}),
        (
            "--tool-call-parser hermes --reasoning-parser none",
            {"tool_call_parser": "hermes", "reasoning_parser": "none"},
        ),
        ("--enable-auto-tool-choice", {}),  # vLLM's, and no news
        ("--device cpu --dtype float32", {"device": "cpu", "dtype": "float32"}),
        (
            "--load-format dummy --seed 7 --trust-remote-code",
            {"load_format": "dummy", "seed": 7, "trust_remote_code": True},
        ),
        ("--attention-backend sdpa --enforce-eager", {"attention_backend": "sdpa", "enforce_eager": True}),
        ("--max-model-len 1k --max-num-seqs 8", {"max_model_len": 1000, "max_num_seqs": 8}),
        ("--max-num-batched-tokens 2Ki --max-queue 0", {"max_num_batched_tokens": 2048, "max_queue": 0}),
        ("--chunked-prefill-size 512", {"chunked_prefill_size": 512}),
        ("--block-size 32 --gpu-memory-utilization 0.5", {"block_size": 32, "gpu_memory_utilization": 0.5}),
        ("--kv-cache-memory-bytes 4G", {"kv_cache_memory_bytes": 4 * 10**9}),
        (
            "--no-enable-prefix-caching --no-async-scheduling",
            {"enable_prefix_caching": False, "async_scheduling": False},
        ),
        ("--async-scheduling --debug-checks", {"async_scheduling": True, "debug_checks": True}),
        ("--log-level debug", {"log_level": "debug"}),
        ("--chat-template {{messages}}", {"chat_template": "{{messages}}"}),
        ("--tensor-parallel-size 1 --kv-cache-dtype auto", {}),
        (
            "--cors-origin https://a.example --cors-origin http://localhost:3000",
            {"cors_origins": ("https://a.example", "http://localhost:3000")},
        ),
        (f"--ssl-certfile {__file__} --ssl-keyfile {__file__}", {"ssl_certfile": __file__, "ssl_keyfile": __file__}),
    ],
)
def test_flags(flags: str, expected: dict[str, object]) -> None:
    config = config_of(*flags.split())
    assert config == ServerConfig(**expected)  # type: ignore[arg-type]
    runner = config.runner_config("")
    for name, value in expected.items():
        if hasattr(runner, name):
            assert getattr(runner, name) == value


def test_help_is_grouped_and_states_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = [action for action in parser._actions if action.help not in (None, argparse.SUPPRESS)][1:]
    assert len(shown) > 25
    for action in shown:
        assert "(default: " in str(action.help), action.dest
    grouped = [action for group in parser._action_groups[2:] for action in group._group_actions]
    assert set(shown) - {parser._actions[1]} == set(grouped)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    assert "memory and scheduling:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tensor-parallel-size 2", "only 1 is accepted"),
        ("-tp 2", "only 1 is accepted"),
        ("--pipeline-parallel-size 4", "only 1 is accepted"),
        ("--quantization awq", "--quantization is not supported"),
        ("--speculative-config {}", "no speculative decoding"),
        ("--enable-lora", "no adapters"),
        ("--lora-modules a=b", "no adapters"),
        ("--kv-cache-dtype fp8", "only auto is accepted"),
        ("--port 70000", "between 0 and 65535"),
        ("--port x", "not a whole number"),
        ("--gpu-memory-utilization 1.5", "between 0 and 1"),
        ("--gpu-memory-utilization nan", "between 0 and 1"),
        ("--gpu-memory-utilization 0", "0 is not above 0"),
        ("--kv-cache-memory-bytes 4Q", "not a size"),
        ("--max-model-len 0", "0 is below 1"),
        ("--shutdown-timeout -1", "between 0"),
        ("--dtype int8", "invalid choice"),
        *((f"--cors-origin {text}", "is not an origin") for text in ("*", "null", "a.example", "https://a.example/")),
        *((f"--cors-origin {text}", "is not an origin") for text in ("https://A.example", "ftp://a", "https://a?b")),
        ("--cors-origin https://a.example:443", "is not what a browser sends"),
        ("--cors-origin https://me@a.example", "is not what a browser sends"),
        ("--cors-origin https://a:99999", "no such port"),
        ("--ssl-certfile /nowhere", "cannot read /nowhere"),
        ("--port 9000 --probe-port 9000", "--probe-port and --port are the same"),
        ("--probe-port 0", "between 1 and 65535"),
        (f"--ssl-keyfile {__file__}", "--ssl-keyfile needs --ssl-certfile"),
        (f"--ssl-ca-certs {__file__}", "--ssl-ca-certs needs --ssl-certfile"),
        ("--chat-template /nowhere", "cannot read /nowhere"),
        ("--max-model 5", "unrecognized arguments"),  # No abbreviations: they change meaning when flags are added.
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert words in usage_error(capsys, *flags.split())


def test_usage_is_that_of_the_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "bench serve", "bench step", "verify", "healthcheck"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--nowhere"])
        first, last = capsys.readouterr().err.splitlines()
        assert first.startswith(f"usage: intarsia {command} [flags]")
        assert last == f"intarsia {command}: error: unrecognized arguments: --nowhere"


def test_an_empty_api_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`--api-key "$UNSET"` must not open the server to everybody, nor to an empty key."""
    assert "must not be empty" in usage_error(capsys, "--api-key", "")


def test_api_keys_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf# whose\r\nfirst \r\n\n  s\xc3\xa9cond#2")
    assert config_of("--api-key", "a", "--api-key-file", str(path)).api_keys == ("a", "first", "sécond#2")
    assert config_of("--api-key-file", str(path), "--api-key", "a").api_keys == ("first", "sécond#2", "a")
    for content, words in ((b"\n# none\n", "there is no key in"), (b"\xff", "not a text in UTF-8")):
        path.write_bytes(content)
        assert words in usage_error(capsys, "--api-key-file", str(path))
    assert "cannot read" in usage_error(capsys, "--api-key-file", str(tmp_path / "missing"))


def test_soft_prompts_have_names_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a=b.safetensors"
    path.touch()
    config = config_of("--soft-prompt", f"poet={path}", "--soft-prompt", f"clerk.v2={tmp_path}")
    assert config.soft_prompts == (("poet", str(path)), ("clerk.v2", str(tmp_path)))
    for given in (str(path), f"={path}", f"a b={path}", f"a:b={path}", f"-a={path}", f"{'x' * 65}={path}"):
        assert "not NAME=PATH" in usage_error(capsys, f"--soft-prompt={given}")
    assert "no file or folder" in usage_error(capsys, f"--soft-prompt=poet={tmp_path}/nothing")


def test_names_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert ServerConfig().model_names == (DEFAULT_MODEL_NAME,)
    assert ServerConfig(model="org/name").model_names == ("org/name",)
    assert ServerConfig(model=str(folder)).model_names == ("my-model",)
    assert ServerConfig(model=str(folder), served_model_name=("a", "b")).model_names == ("a", "b")


def test_without_a_command_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve a model over HTTP" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("intarsia ")
