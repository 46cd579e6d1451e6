"""How log lines look: text, or with `--log-format json` one JSON object each. `worker.configure_process` installs it in
every API process; the runner has its own.

A record may bring `fields` (`request_log`'s do): they are members of the object. Whatever a record holds, it is one
line: JSON escapes line ends, and so does the text of a request's line, which holds none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        fields: Mapping[str, Any] | None = getattr(record, "fields", None)
        if fields is None:
            line["message"] = record.getMessage()
        else:
            line |= {"message": "request", **fields}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Pairs:
    """Fields as `name=value name=value`, written out only when a record is."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self._fields.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def formatter(kind: str) -> logging.Formatter:
    return JsonLines() if kind == "json" else logging.Formatter(TEXT)
