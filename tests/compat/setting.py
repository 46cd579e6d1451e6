"""What a client's script is told of the servers, the questions that all scripts ask, and how a script is run.

Only the standard library: this is imported in the environment of each client.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Written by `tests.compat` as a JSON file; `tests/compat/node/setting.mjs` reads the same."""

    base: str
    """A server with the default model, whose chat template takes tools: `http://…/v1`."""
    model: str
    scripted: str
    """A server that follows `templates/scripted.jinja`: `http://…/v1`. What it answers is certain."""
    scripted_model: str
    prompt_ids: list[int]
    """`QUESTION` in the default model's chat template."""
    prompt_embeds: str
    """The same prompt's rows of the embedding table: base64 of safetensors."""
    answer: str
    """What plain transformers says to it with greedy decoding."""


QUESTION = "What is the capital of France?"
CITIES = ("Paris", "London", "Tokyo")
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER = "rain, 9 degrees"
WEATHER_ANSWER = f"The tool says: {WEATHER}"
"""Of the scripted server, once the tool has told it `WEATHER`. It asks for Paris, or for Paris and London where the
question has "both" in it."""


def check_city(value: Any) -> None:
    """`value` follows `CITY_SCHEMA`."""
    assert set(value) == {"city", "is_capital"}, value
    assert value["city"] in CITIES, value
    assert isinstance(value["is_capital"], bool), value


def run(exercises: Sequence[Callable[[Setting], None]]) -> int:
    """The exit status of a script: 1 if an exercise fails. All of them are tried; each prints a line."""
    setting = Setting(**json.loads(Path(sys.argv[1]).read_text()))
    failed = 0
    for exercise in exercises:
        try:
            exercise(setting)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {exercise.__name__}", flush=True)
        else:
            print(f"ok     {exercise.__name__}", flush=True)
    print(f"{len(exercises) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0
