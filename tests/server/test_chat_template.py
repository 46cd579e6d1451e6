"""Chat templates: the model's and the operator's, and what they do with messages they do not like."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.chat_template import ChatTemplate
from server.conversation import parse_messages
from server.errors import InvalidRequest
from server.tokenizer import Tokenizer
from tests.models import build_tokenizer
from tests.server.fakes import tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def render(override: str | None = None, messages: Any = HELLO, **options: Any) -> str:
    return asyncio.run(ChatTemplate(tokenizer(), override).render(messages, **options))


def test_the_models_own() -> None:
    assert render() == "<bos><turn>user\nhello<eos>\n<turn>assistant\n"
    assert render(add_generation_prompt=False) == "<bos><turn>user\nhello<eos>\n"


def test_continue_final_message() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    text = render(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<bos><turn>user\nhello<eos>\n<turn>assistant\nWell,"


def test_long_conversations() -> None:
    assert len(render(messages=HELLO * 5000)) == len("<bos><turn>assistant\n") + 5000 * len("<turn>user\nhello<eos>\n")


def test_the_operators() -> None:
    assert render("{{ messages[0].content }}!") == "hello!"


def test_variables() -> None:
    assert render("{{ mood }}", variables={"mood": "calm"}) == "calm"


def test_what_the_template_says_is_passed_on() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate' + 'x' * 10000) }}")
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("template", ["{{ 1 + 'x' }}", "{{ nothing.there }}", "{% if %}", "{{ messages[7].x.y }}"])
def test_other_failures_are_the_requests_too(template: str) -> None:
    with pytest.raises(InvalidRequest):
        render(template)


@pytest.mark.parametrize("options", [{"variables": {"x": 1}}, {"messages": HELLO * 40}, {"template": "own"}])
def test_a_template_that_never_ends(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """It is not rendered where it would hold up everybody, and it is given up."""
    monkeypatch.setattr("server.chat_template._MAX_SECONDS", 0.05)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    if "template" in options:
        options, override = {**options, "template": loop}, None
    else:
        override = loop
    with pytest.raises(InvalidRequest, match="takes longer") as caught:
        render(override, **options)
    assert caught.value.param == "messages"


def test_documents() -> None:
    assert render("{{ documents[0].title }}", documents=[{"title": "a"}]) == "a"


def test_a_template_for_one_request() -> None:
    assert render("{{ 'operator' }}", template="{{ messages[0].content }}?") == "hello?"


def test_words_of_a_template() -> None:
    template = ChatTemplate(tokenizer(), "{{ documents }}")
    assert template.mentions("documents") and not template.mentions("developer")
    assert template.mentions("developer", "{{ developer }}") and not template.mentions("documents", "x")
    own = build_tokenizer()
    own.chat_template = {"default": "a", "rag": "{{ documents }}"}
    assert ChatTemplate(Tokenizer(own)).mentions("documents")


def test_the_sandbox_holds() -> None:
    with pytest.raises(InvalidRequest):
        render("{{ messages.append.__globals__ }}")


def test_no_template() -> None:
    plain = build_tokenizer()
    plain.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        asyncio.run(ChatTemplate(Tokenizer(plain)).render(HELLO))


def test_load_reads_a_file_or_takes_the_text(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ 'file' }}")
    for override, text in ((str(path), "file"), ("{{ 'text' }}", "text")):
        template = ChatTemplate.load(tokenizer(), override)
        assert asyncio.run(template.render(HELLO)) == text
    with pytest.raises(ValueError, match="--chat-template"):
        ChatTemplate.load(tokenizer(), str(tmp_path / "missing"))


CALLS = [
    *HELLO,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]
AS_OBJECT = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
AS_TEXT = "{% for m in messages %}{% for c in m.tool_calls %}{{ ':' + c.function.arguments }}{% endfor %}{% endfor %}"


def test_arguments_are_what_the_template_takes() -> None:
    messages = parse_messages(CALLS)
    assert render(AS_OBJECT, messages) == '{"a": 1}'
    assert render(AS_TEXT, messages) == ':{"a":  1}'  # to the character
    assert render(None, messages, template=AS_TEXT) == ':{"a":  1}'


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{% for each in tools %}{{ each.function.name }}{% endfor %}", tools=tools) == "f"


def test_names_that_are_ours() -> None:
    reserved = ChatTemplate(tokenizer()).reserved_names
    assert {"messages", "conversation", "chat_template", "tokenize", "tools", "add_generation_prompt"} <= reserved
    assert "enable_thinking" not in reserved
