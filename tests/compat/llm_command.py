"""The command line `llm` against the servers of `tests.compat`, configured as its manual says.

python -m tests.compat.llm_command SETTING_JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.setting import CITY_SCHEMA, QUESTION, WEATHER, WEATHER_ANSWER, Setting, check_city, run

FUNCTION = f'''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return {WEATHER!r}
'''


def llm(setting: Setting, *arguments: str) -> str:
    """What the command prints, without the newline at the end. Raises CalledProcessError where it fails."""
    models = [
        _model("default", setting.base, setting.model, supports_schema=True),
        _model("scripted", setting.scripted, setting.scripted_model, supports_tools=True),
        _model("text", setting.base, setting.model, completion=True),
    ]
    with tempfile.TemporaryDirectory() as folder:
        # YAML is a superset of JSON.
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models))
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        command = [str(Path(sys.executable).with_name("llm")), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def _model(model_id: str, base: str, name: str, **more: bool) -> dict[str, object]:
    return {"model_id": model_id, "model_name": name, "api_base": base, **more}


def chat(setting: Setting) -> None:
    assert llm(setting, "-m", "default", "--no-stream", "-o", "temperature", "0", QUESTION) == setting.answer


def chat_streamed(setting: Setting) -> None:
    assert llm(setting, "-m", "default", "-o", "temperature", "0", QUESTION) == setting.answer


def tools(setting: Setting) -> None:
    """The command runs the function and sends its result back by itself, streamed and whole."""
    for more in ((), ("--no-stream",)):
        printed = llm(setting, "-m", "scripted", "--functions", FUNCTION, *more, "The weather in both?")
        assert printed == WEATHER_ANSWER


def structured_output(setting: Setting) -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "128")
    printed = llm(setting, "-m", "default", "--schema", json.dumps(CITY_SCHEMA), *options, QUESTION)
    check_city(json.loads(printed))


def completions(setting: Setting) -> None:
    """Its prompts are texts: neither ids nor embeddings."""
    options = ("-m", "text", "-o", "temperature", "0", "-o", "max_tokens", "8")
    printed = llm(setting, *options, "The capital of France is")
    assert printed and printed == llm(setting, *options, "--no-stream", "The capital of France is")


EXERCISES = (chat, chat_streamed, tools, structured_output, completions)

if __name__ == "__main__":
    sys.exit(run(EXERCISES))
