"""Images in a chat template: rendered with a marker in the place of the literal that stands for an image, so that what
the template writes for an image and what a user writes about one are never mistaken for each other.

Used by `chat`. The marker is drawn once a process and never leaves it; no text that a client could write has it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server.chat_template import ChatTemplate
from server.vision import Vision

logger = logging.getLogger(__name__)

_PROBE = "probe of a text"


def processor_template(folder: Path) -> str | None:
    """The chat template of a processor's own file, where older models that see keep it."""
    try:
        template = json.loads((folder / "chat_template.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return template if isinstance(template, str) else None


class ImageTemplate:
    """The server's chat template, for conversations with images. `knows_images`: whether it shows them at all."""

    def __init__(self, template: ChatTemplate, vision: Vision) -> None:
        self._vision = vision
        source = template.source
        self.knows_images = False
        self.wants_parts = False
        """Whether every content has to be a list of parts: a text alone is dropped."""
        if source is None:
            return
        as_text = [{"role": "user", "content": _PROBE}]
        as_parts = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        self.wants_parts = _PROBE not in template.probe(as_text, source) and _PROBE in template.probe(as_parts, source)
        shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _PROBE}]}]
        text = template.probe(shown, self.marked(source))
        self.knows_images = text.count(vision.marker) == 1 and _PROBE in text
        if not self.knows_images:
            logger.warning("the chat template has no place for images: they are taken by /v1/completions only")

    def marked(self, source: str) -> str:
        """A template's text with the marker in it."""
        return source.replace(self._vision.layout.placeholder, self._vision.marker)

    def with_parts(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Every content as a list, if the template wants it so."""
        if not self.wants_parts:
            return list(messages)
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in messages
        ]
