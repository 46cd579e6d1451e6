"""How the runner's log lines look: text, or with `--log-format json` one JSON object each, as the server's own
(`server/log_format.py`; neither of the two imports the other)."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def formatter(kind: str) -> logging.Formatter:
    return JsonLines() if kind == "json" else logging.Formatter(TEXT)
