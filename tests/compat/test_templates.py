"""The template that docs/tools.md and `make compat` put in the place of the default model's says the same where there
are no tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from server.tools.styles import tool_style_of
from tests.compat.servers import TEMPLATES, TOOLS_TEMPLATE

pytestmark = pytest.mark.timeout(300)  # on a busy machine the model takes a minute to be converted

USER, ANSWER = {"role": "user", "content": "Hello\nyou"}, {"role": "assistant", "content": "Yes?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("chat", [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER]])
@pytest.mark.parametrize("prompted", [False, True])
def test_no_tools(default_model: Path, chat: list[dict[str, str]], prompted: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    template = TOOLS_TEMPLATE.read_text()
    options = {"tokenize": False, "add_generation_prompt": prompted}
    own = tokenizer.apply_chat_template(chat, **options)
    assert tokenizer.apply_chat_template(chat, chat_template=template, **options) == own


def test_style() -> None:
    for path in (TOOLS_TEMPLATE, TEMPLATES / "scripted.jinja"):
        style = tool_style_of(path.read_text())
        assert style is not None and style.name == "hermes"
