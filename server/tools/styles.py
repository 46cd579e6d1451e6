"""The styles in which models write calls, and which of them a chat template asks for. `--tool-call-parser` takes these
names."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.tools import hermes, llama3, mistral, pythonic, qwen3_coder
from server.tools.events import ToolParser

_ALPHANUMERIC = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_call_id() -> str:
    """Mistral's templates refuse any other kind when the call is replayed."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolStyle:
    name: str
    markers: tuple[str, ...]
    """What the parser must see, also where they are special tokens."""
    parser: Callable[[Mapping[str, Mapping[str, Any]], frozenset[str]], ToolParser]
    """(the functions with their arguments' schemas, the markers that are special tokens) to a choice's parser."""
    new_id: Callable[[], str] = _call_id


_HERMES = ToolStyle("hermes", (hermes.START, hermes.END), hermes.HermesParser)
_LLAMA3 = ToolStyle("llama3_json", (llama3.START,), llama3.Llama3Parser)
_MISTRAL = ToolStyle(
    "mistral", (mistral.START, mistral.ARGS, mistral.CALL_ID), mistral.MistralParser, new_id=_mistral_call_id
)
_PYTHONIC = ToolStyle("pythonic", (*pythonic.STARTS, *pythonic.ENDS), pythonic.PythonicParser)

_QWEN3_CODER = ToolStyle("qwen3_coder", (qwen3_coder.START, qwen3_coder.END), qwen3_coder.Qwen3CoderParser)

TOOL_STYLES: dict[str, ToolStyle] = {
    style.name: style for style in (_HERMES, _LLAMA3, _MISTRAL, _PYTHONIC, _QWEN3_CODER)
}


def load_tool_style(name: str, template: str) -> ToolStyle | None:
    """`name`: a style, "auto" (the template tells) or "none". Raises ValueError for any other."""
    if name == "auto":
        return tool_style_of(template)
    if name != "none" and name not in TOOL_STYLES:
        raise ValueError(f"--tool-call-parser: {name} is not one of auto, none, {', '.join(TOOL_STYLES)}")
    return TOOL_STYLES.get(name)


_OTHER_STYLES = ("<arg_key>", "<｜tool▁calls▁begin｜>", "<|channel|>", "<function_calls>")
"""Found in templates of models whose calls no parser here reads, although some have `<tool_call>` around them."""


def tool_style_of(template: str) -> ToolStyle | None:
    """The style that a chat template's text asks for; None if it takes no tools, or its style is not known."""
    if "tools" not in template or any(mark in template for mark in _OTHER_STYLES):
        return None
    if "<function=" in template and "<parameter=" in template:
        return _QWEN3_CODER
    if "<tool_call>" in template:
        return _HERMES
    if mistral.START in template:
        return _MISTRAL
    if any(mark in template for mark in (*pythonic.STARTS[:2], "[func_name1(")):
        return _PYTHONIC
    if llama3.START in template or '{"name": function name, "parameters"' in template:
        return _LLAMA3
    return None
