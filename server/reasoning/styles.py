"""The styles in which models reason, and which of them a chat template belongs to. `--reasoning-parser` takes these
names."""

from __future__ import annotations

from dataclasses import dataclass

from server.reasoning.think import ThinkMarkers, ThinkParser

_THINK = ThinkMarkers("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    markers: ThinkMarkers
    always: bool = False
    """The model reasons whether its prompt or its answer begins with the start marker or not."""

    @property
    def all_markers(self) -> tuple[str, ...]:
        return (self.markers.start, self.markers.end)

    def is_open(self, prompt: str, continued: str | None = None) -> bool:
        """Whether the answer to `prompt` begins within the reasoning. `continued`: the beginning of the answer that is
        the prompt's end."""
        if continued and self.markers.start in continued:
            return continued.rfind(self.markers.start) > continued.rfind(self.markers.end)
        tail = prompt.rstrip()
        return tail.endswith(self.markers.start) or (self.always and not tail.endswith(self.markers.end))

    def parser(self, *, is_open: bool) -> ThinkParser:
        return ThinkParser(self.markers, is_open=is_open)


REASONING_STYLES: dict[str, ReasoningStyle] = {
    "qwen3": ReasoningStyle(_THINK),
    "deepseek_r1": ReasoningStyle(_THINK, always=True),
    "mistral": ReasoningStyle(ThinkMarkers("[THINK]", "[/THINK]")),
}


def load_reasoning_style(name: str, template: str) -> ReasoningStyle | None:
    """`name`: a style, "auto" (the template tells) or "none". Raises ValueError for any other."""
    if name == "auto":
        return reasoning_style_of(template)
    if name != "none" and name not in REASONING_STYLES:
        raise ValueError(f"--reasoning-parser: {name} is not one of auto, none, {', '.join(REASONING_STYLES)}")
    return REASONING_STYLES.get(name)


def reasoning_style_of(template: str) -> ReasoningStyle | None:
    """The style that a chat template's text speaks of; None for a model that does not reason."""
    if "</think>" in template:
        return REASONING_STYLES["qwen3"]
    return REASONING_STYLES["mistral"] if "[THINK]" in template else None
