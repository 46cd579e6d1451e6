"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Container

from server.tools.json_calls import JsonCalls

START, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCalls):
    def __init__(self, names: Container[str], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(names, starts=(START,), ends=(END,), hidden=hidden)
