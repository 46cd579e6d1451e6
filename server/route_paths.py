"""Which of the server's routes a path is meant for. Asked by the request log about requests that were answered before
they reached the router: while the model loads or the server drains, without a key, with too large a body."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Route


class RoutePaths:
    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        known = [route for route in routes if isinstance(route, Route)]
        self._whole = frozenset(route.path for route in known if not route.param_convertors)
        self._patterns: list[tuple[re.Pattern[str], str]] = [
            (route.path_regex, route.path) for route in known if route.param_convertors
        ]

    def of(self, path: str) -> str:
        """The route as it is declared, whatever the method; empty where there is none."""
        if path in self._whole:
            return path
        return next((route for pattern, route in self._patterns if pattern.match(path)), "")
