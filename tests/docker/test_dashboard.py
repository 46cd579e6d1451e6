"""The dashboard and the alerts ask for nothing that a running server doesn't export. Whether Prometheus understands
them is `test_compose`'s to say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docker.dashboard import alerts, dashboard, expressions, metrics_in, panels
from tests.models import Family
from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script

PAGE_WIDTH = 24
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def exported(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all samples that /metrics can have."""
    script = Script(model=str(tiny_model("llama")))
    with ServerProcess(script, tmp_path_factory.mktemp("server")) as server, server.wait_ready().client() as client:
        text = client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    return {family.name + ending for family in families for ending in ENDINGS.get(family.type, ())}


def test_all_metrics_are_there(exported: set[str]) -> None:
    asked = {name for _, expression in expressions() for name in metrics_in(expression)}
    assert len(asked) > 25
    assert asked <= exported, asked - exported
    warned = {name for rule in alerts() for name in metrics_in(rule["expr"])}
    assert len(warned) > 4
    assert warned <= exported, warned - exported


def test_alerts_say_whom_they_concern() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        labels = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        assert labels, rule["alert"]
        if by := re.search(r"sum by \(([^)]*)\)", rule["expr"]):
            assert {*labels} <= {*re.split(r",\s*", by[1])}, "labels that the sum has dropped"


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= PAGE_WIDTH
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_panel_says_what_it_shows_and_follows_the_variables() -> None:
    for panel in panels():
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert re.search(r'instance=~"\$instance"', target["expr"]), panel["title"]
