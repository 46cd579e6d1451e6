"""Images among a prompt's parts: the text around each as the model's processor writes it, tokenised as it is there.

Used by `inputs`. transformers' processors put an image into a text and tokenise the whole of it; here the pieces
between images are tokenised each by itself, with the image's token next to it, and so become the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from server.segments import ImagePart, Part, TextPart
from server.vision import Layout


def laid_out(parts: Sequence[Part], layout: Layout) -> list[Part]:
    """The parts with every image between two texts, which may be empty: what the processor writes before and behind it
    joins the neighbours' texts."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return list(parts)
    done: list[Part] = []
    behind_image = False
    for part in parts:
        if isinstance(part, ImagePart):
            text = _pop_text(done, part.where)
            done.append(replace(text, text=text.text + layout.before, between=(text.between[0], layout.image_token)))
            done += [part, TextPart(layout.after, part.where, (layout.image_token, ""))]
        elif isinstance(part, TextPart) and behind_image:
            last = _pop_text(done, part.where)
            done.append(replace(last, text=last.text + part.text, where=part.where))
        else:
            done.append(part)
        behind_image = isinstance(part, ImagePart)
    return done


def _pop_text(done: list[Part], where: str) -> TextPart:
    """The text at the end, taken off; an empty one where there is none."""
    if done and isinstance(done[-1], TextPart):
        last = done.pop()
        assert isinstance(last, TextPart)  # noqa: S101 - for mypy
        return last
    return TextPart("", where)


def with_neighbours(part: TextPart) -> str:
    """A text with the special tokens that stand next to it, to be tokenised so."""
    before, behind = part.between
    return f"{before}{part.text}{behind}"


def without_neighbours(token_ids: list[int], part: TextPart) -> list[int]:
    """The ids of `with_neighbours`, without those of the special tokens."""
    before, behind = part.between
    return token_ids[bool(before) : len(token_ids) - bool(behind)]
