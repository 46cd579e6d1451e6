"""Engines kept between tests, by their settings. Loading one takes longer than many a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import Family
from tests.parity.harness import Harness


class EngineShelf:
    """`engine(family, …)` is an idle engine that others have used before: clean or dirty must make no difference."""

    def __init__(self, path: Callable[[Family], Path], **defaults: Any) -> None:
        self.path = path
        """The folder of a family's tiny model."""
        self._defaults = defaults
        self._engines: dict[tuple[Family, frozenset[tuple[str, Any]]], Harness] = {}

    def engine(self, family: Family, **settings: Any) -> Harness:
        key = (family, frozenset(settings.items()))
        harness = self._engines.get(key)
        # A test that failed half-way leaves its requests behind.
        if harness is None or harness.engine.has_work:
            harness = self._engines[key] = Harness(self.path(family), **{**self._defaults, **settings})
        return harness
