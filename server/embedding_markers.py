"""Where the embedding and image parts of a conversation end up in the text that a chat template makes of it. Used by
`conversation`, which puts a marker into a message's text for each embedding, and by `chat`, which splits the rendered
text there. The markers of images are put in by the template itself (`image_template`).

A marker is made of 128 random bits that are drawn for this one request (those of images for this process, and it never
shows them): no text that a client could write has it, so none is ever searched for anything that it could know.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

from server.errors import InvalidRequest, UnsupportedParameter
from server.segments import (
    MAX_IMAGES,
    MAX_PARTS,
    ImagePart,
    Part,
    RowsPart,
    TextPart,
    parse_embedding_part,
    parse_image_part,
    parse_soft_prompt_part,
)

ROW_PARTS = ("prompt_embeds", "soft_prompt")
"""Types of part that become rows and not text, and that templates know nothing of."""

_CUT_CHARS = 10
"""So much of the random bits' beginning or end in the text gives away a marker that was cut."""


class EmbeddingMarkers:
    """The embedding and image parts of one conversation. False where it has none. `take_embeddings`: whether the server
    does. `image_marker`: what the template writes for an image; empty where the model sees none."""

    def __init__(self, *, take_embeddings: bool, image_marker: str = "") -> None:
        self._take_embeddings, self._image_marker = take_embeddings, image_marker
        self.images: list[ImagePart] = []
        self._parts: list[RowsPart] = []
        # Letters and digits only, since templates trim, escape and quote; a letter first, so that any change of case
        # shows.
        self._secret = secrets.token_hex(16)
        image = f"|({image_marker})" if image_marker else "|((?!))"
        self._pattern = re.compile(f"(?:r{self._secret}n([0-9]+)z{image})")

    def __bool__(self) -> bool:
        return bool(self._parts or self.images)

    @property
    def num_chars(self) -> int:
        """Of all markers together, at most."""
        of_images = len(self.images) * len(self._image_marker)
        return len(self._parts) * (len(self._secret) + len(f"rn{MAX_PARTS}z")) + of_images

    def add_image(self, part: Mapping[str, Any], where: str) -> None:
        """An image part, in the conversation's order. Raises InvalidRequest, or UnsupportedParameter."""
        image = parse_image_part(part, where, take_images=bool(self._image_marker))
        if len(self.images) == MAX_IMAGES:
            raise InvalidRequest(f"messages can have at most {MAX_IMAGES} images.", param=image.where)
        self.images.append(image)

    def mark(self, part: Mapping[str, Any], where: str) -> str:
        """The text that stands for this part until `split`. Raises InvalidRequest, or UnsupportedParameter."""
        if len(self._parts) == MAX_PARTS:
            raise InvalidRequest(f"messages can have at most {MAX_PARTS} parts with rows.", param="messages")
        if part.get("type") == "soft_prompt":
            self._parts.append(parse_soft_prompt_part(part, where))
        else:
            self._parts.append(parse_embedding_part(part, where, take_embeddings=self._take_embeddings))
        return f"r{self._secret}n{len(self._parts) - 1}z"

    def split(self, text: str) -> list[Part]:
        """The rendered text as parts, none of them an empty text. Raises InvalidRequest unless the template has put
        every embedding part into the prompt, once and as it was, and as many images as there are."""
        pieces = self._pattern.split(text)
        texts, numbers = pieces[::3], pieces[1::3]
        self._check(texts, [number for number in numbers if number is not None])
        if len(self.images) != sum(number is None for number in numbers):
            raise InvalidRequest(
                "The chat template does not show every image of these messages exactly once.", param="messages"
            )
        parts: list[Part] = []
        images = iter(self.images)
        for index, piece in enumerate(texts):
            if piece:
                parts.append(TextPart(piece, "messages"))
            if index < len(numbers):
                parts.append(next(images) if numbers[index] is None else self._parts[int(numbers[index])])
        return parts

    def _check(self, texts: list[str], numbers: list[str]) -> None:
        found = Counter(numbers)
        for number, part in enumerate(self._parts):
            count = found.pop(str(number), 0)
            if count != 1:
                raise _misused(part, "repeats" if count else "leaves out or changes")
        ends = (self._secret[:_CUT_CHARS], self._secret[-_CUT_CHARS:])
        if found or any(end in folded for folded in map(str.lower, texts) for end in ends):
            raise _misused(self._parts[0], "repeats or changes")


def no_embeddings(where: str) -> UnsupportedParameter:
    """For routes that have no use for them."""
    return UnsupportedParameter(f"{where}.type: only text parts are supported.", param=f"{where}.type")


def _misused(part: RowsPart, what: str) -> InvalidRequest:
    where = part.where.rpartition(".")[0]  # without what its rows came in
    return InvalidRequest(f"{where}: the chat template {what} this part, which has to stay as it is.", param=where)
