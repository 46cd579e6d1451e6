"""Calls as Llama 3.1 to 3.3 write them: the whole answer is `{"name": …, "parameters": {…}}`, or several of them with
semicolons between, or they stand behind `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Container

from server.tools.json_calls import JsonCalls

START = "<|python_tag|>"


class Llama3Parser(JsonCalls):
    def __init__(self, names: Container[str], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(names, starts=(START,), bare=True, hidden=hidden)
