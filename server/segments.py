"""The parts of a mixed prompt as clients send them: text, token ids, embeddings, soft prompts, checked one by one.
`inputs` reads those of a completion's `prompt`, `conversation` the parts of a chat message that are rows; `inputs`
makes rows of them.

Checked by hand, so that an error names the one part that is wrong (`prompt[2].data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.arriving_file import ArrivingFile
from server.errors import InvalidRequest, UnsupportedParameter

MAX_PARTS = 4096
"""Of all prompts of one request together; embedding parts of one conversation."""

MAX_IMAGES = 16
"""Of one request."""

_SOURCES = ("data", "id", "part")
_MAX_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str = field(repr=False)
    where: str
    """The field that it came in, for errors."""
    between: tuple[str, str] = ("", "")
    """Special tokens that stand before and behind it in the prompt: it is tokenised with them there, and they are then
    left out."""


@dataclass(frozen=True, slots=True)
class IdsPart:
    token_ids: list[Any] = field(repr=False)
    """Not checked yet: that takes the vocabulary."""
    where: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A tensor field of a multipart body. `attachments` puts it where the part that names it would have `data`."""

    file: ArrivingFile = field(repr=False)


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    data: str | Attachment = field(repr=False)
    """A tensor file, in base64 or as it came, not decoded yet. Empty where `stored` names the rows."""
    where: str
    hints: Hints | None = None
    stored: str = ""
    """The id of a stored embedding."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    url: str = field(repr=False)
    """A `data:` URL, or one to fetch. Not read yet."""
    where: str


@dataclass(frozen=True, slots=True)
class Hints:
    """Which tokens an embedding part's rows stand for, in the client's opinion."""

    token_ids: list[Any] = field(repr=False)
    """An id or None for each row. Neither checked against the vocabulary yet, nor their number."""
    where: str


@dataclass(frozen=True, slots=True)
class SoftPromptPart:
    name: str
    where: str


RowsPart = EmbeddingPart | SoftPromptPart
"""What a chat message may have beside texts and images."""
Part = TextPart | IdsPart | RowsPart | ImagePart


def parse_parts(value: Sequence[Any], where: str, *, take_embeddings: bool, take_images: bool = False) -> list[Part]:
    """The parts of one prompt. `take_embeddings`: whether this server takes any; `take_images`: whether its model sees.

    Raises InvalidRequest, or UnsupportedParameter for parts that this server does not know.
    """
    return [_parse_part(part, f"{where}[{index}]", take_embeddings, take_images) for index, part in enumerate(value)]


def _parse_part(part: Any, where: str, take_embeddings: bool, take_images: bool) -> Part:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object: a list of parts has only parts.", param=where)
    kind = part.get("type")
    if kind == "prompt_embeds":
        return parse_embedding_part(part, where, take_embeddings=take_embeddings)
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}.text must be a string.", param=f"{where}.text")
        return TextPart(part["text"], f"{where}.text")
    if kind == "token_ids":
        ids = part.get("token_ids")
        if not isinstance(ids, list) or not ids:
            raise InvalidRequest(f"{where}.token_ids must be a list of token ids.", param=f"{where}.token_ids")
        return IdsPart(ids, f"{where}.token_ids")
    if kind == "image_url":
        return parse_image_part(part, where, take_images=take_images)
    if kind == "soft_prompt":
        return parse_soft_prompt_part(part, where)
    raise InvalidRequest(
        f"{where}.type must be one of text, token_ids, prompt_embeds, soft_prompt, image_url.", param=f"{where}.type"
    )


def parse_embedding_part(part: Mapping[str, Any], where: str, *, take_embeddings: bool) -> EmbeddingPart:
    """A part whose type is prompt_embeds. Raises InvalidRequest."""
    if not take_embeddings:
        raise InvalidRequest(f"{where}: this server takes no prompt_embeds.", param=where)
    hints = _parse_hints(part.get("token_ids"), f"{where}.token_ids")
    given = [name for name in _SOURCES if part.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{where} must have only one of {', '.join(_SOURCES)}.", param=where)
    if given == ["id"]:
        return _stored_part(part["id"], f"{where}.id", hints)
    if given == ["part"]:
        raise InvalidRequest(
            f"{where}.part names a field of a multipart/form-data body, and this body is not one.",
            param=f"{where}.part",
        )
    data = part.get("data")
    if data is None:
        raise InvalidRequest(
            f"{where} must have data (a tensor file in base64), part (a field of a multipart body) or id (of a stored"
            " embedding).",
            param=f"{where}.data",
        )
    if isinstance(data, Attachment):
        return EmbeddingPart(data, f"{where}.part", hints)
    if not isinstance(data, str):
        raise InvalidRequest(f"{where}.data must be a tensor file in base64.", param=f"{where}.data")
    return EmbeddingPart(data, f"{where}.data", hints)


def _stored_part(value: Any, where: str, hints: Hints | None) -> EmbeddingPart:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ID_CHARS:
        raise InvalidRequest(f"{where} must be the id of a stored embedding.", param=where)
    return EmbeddingPart("", where, hints, value)


def parse_image_part(part: Mapping[str, Any], where: str, *, take_images: bool) -> ImagePart:
    """A part whose type is image_url: `{"image_url": {"url", "detail"}}`, or the URL itself. `detail` is a wish that is
    checked and has no effect: an image gets the size that the model's image processor gives it.

    Raises InvalidRequest, or UnsupportedParameter.
    """
    if not take_images:
        raise UnsupportedParameter(f"{where}.type: this model takes no images.", param=f"{where}.type")
    image, where = part.get("image_url"), f"{where}.image_url"
    if isinstance(image, dict):
        if image.get("detail") not in _DETAILS:
            raise InvalidRequest(f"{where}.detail must be auto, low or high.", param=f"{where}.detail")
        image, where = image.get("url"), f"{where}.url"
    if not isinstance(image, str) or not image:
        raise InvalidRequest(f"{where} must be a data: URL, or one that this server may fetch.", param=where)
    return ImagePart(image, where)


_DETAILS = (None, "auto", "low", "high", "original")


def _parse_hints(value: Any, where: str) -> Hints | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list with a token id or null for each row.", param=where)
    return Hints(value, where)


def parse_soft_prompt_part(part: Mapping[str, Any], where: str) -> SoftPromptPart:
    """A part whose type is soft_prompt. Raises InvalidRequest."""
    name = part.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name must be the name of a soft prompt.", param=f"{where}.name")
    return SoftPromptPart(name, f"{where}.name")
