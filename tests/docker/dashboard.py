"""The dashboard and the alerts as lists of PromQL expressions, for the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.docker.engine import ROOT

FILES = ROOT / "docker" / "helm" / "intarsia" / "files"
_METRIC = re.compile(r"\b(intarsia:[a-z_0-9]+|process_[a-z_]+)")


def dashboard() -> dict[str, Any]:
    found = json.loads((FILES / "dashboard.json").read_text())
    assert isinstance(found, dict)
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Title of the panel and expression, with Grafana's variables filled in: everything, over half a minute."""
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "30s")
            yield panel["title"], re.sub(r"\$(model|instance)\b", ".*", text)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    return set(_METRIC.findall(expression))
