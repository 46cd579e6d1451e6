"""Renders, lints and validates the chart: run by the Python of the tools' environment, which has Helm and the schemas.

    python chart_tool.py < {"chart": folder, "values": {…}}

prints {"lint": […], "error": text, "resources": […], "notes": text, "invalid": […]}. Each resource is held against the
strict schemas of each Kubernetes release in `RELEASES`, and kinds of operators against the models that are made from
their CRDs. Standard library and tools only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

RELEASES = ("1.25", "1.28", "1.31", "1.34", "1.37")


def main() -> None:
    import helm_python
    import yaml

    asked = json.load(sys.stdin)
    said: dict[str, Any] = {"lint": [], "error": "", "resources": [], "notes": "", "invalid": []}
    for message in helm_python.lint(asked["chart"])["messages"]:
        if message["severity"] > 1:  # 1 is information
            said["lint"].append(message)
    try:
        with helm_python.Chart.load(asked["chart"]) as chart:
            chart.validate_schema(chart.merge_values(asked["values"]))
            files = chart.render(asked["values"], name="demo", namespace="prod")
    except helm_python.HelmError as error:
        said["error"] = str(error)
        files = {}
    for name, text in files.items():
        if name.endswith("NOTES.txt"):
            said["notes"] = text
            continue
        said["resources"] += [document for document in yaml.safe_load_all(text) if document]
    for resource in said["resources"]:
        said["invalid"] += [f"{resource['kind']}: {reason}" for reason in _errors(resource)]
    json.dump(said, sys.stdout)


def _errors(resource: dict[str, Any]) -> Iterator[str]:
    if model := _operator_model(resource["kind"]):
        try:
            understood = model.model_validate(resource)
        except ValueError as error:
            yield str(error)
        else:
            known = understood.model_dump(by_alias=True, exclude_unset=True, mode="json")
            yield from _unknown(resource, known, "")
        return
    import kubernetes_validate

    for release in RELEASES:
        try:
            kubernetes_validate.validate(resource, release, strict=True)
        except Exception as error:  # of many kinds, each with a message
            yield f"Kubernetes {release}: {getattr(error, 'message', error)}"


def _operator_model(kind: str) -> Any:
    if kind == "ScaledObject":
        from cloudcoil.models.keda.v1alpha1 import ScaledObject

        return ScaledObject
    if kind in ("ServiceMonitor", "PrometheusRule"):
        from cloudcoil.models.prometheus_operator import v1

        return getattr(v1, kind)
    return None


def _unknown(given: Any, known: Any, path: str) -> Iterator[str]:
    """What the models have dropped: they ignore what they don't know."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(known, dict) or key not in known:
                yield f"{path}.{key} is unknown"
            else:
                yield from _unknown(value, known[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from _unknown(value, known[index], f"{path}[{index}]")


if __name__ == "__main__":
    main()
