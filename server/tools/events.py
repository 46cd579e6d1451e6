"""What a tool parser makes of a model's text, and the interface of the parsers. Read by `server.chat_parts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Content: no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the running call's arguments, which all together are JSON (if the model wrote any)."""

    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The running call is over. Every call that was started has one."""


ToolEvent = Text | CallStarted | CallArguments | CallEnded


class ToolParser(Protocol):
    """One choice's parser. What comes out does not depend on where the text was split.

    Nothing is taken for a call before its name is known. What turns out not to be one comes out as the text that it is;
    what goes wrong in the arguments after that stays in them, as the model wrote it.
    """

    def push(self, text: str) -> list[ToolEvent]:
        """What the next piece of text makes certain. Time: linear in its length."""

    def flush(self) -> list[ToolEvent]:
        """The rest, when no more text comes."""
