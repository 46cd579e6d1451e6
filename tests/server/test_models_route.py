"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import pytest
from openai.types import Model

from tests.server.fakes import MODEL, NAMES, api, say


def test_the_list() -> None:
    with api(say("")) as (client, _):
        body = client.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == list(NAMES)
    for card in body["data"]:
        Model.model_validate(card, strict=True)
        assert card["max_model_len"] == MODEL.max_model_len


@pytest.mark.parametrize("name", NAMES)
def test_one(name: str) -> None:
    with api(say("")) as (client, _):
        assert client.get(f"/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("name", ["other", "org", "tiny/x"])
def test_others(name: str) -> None:
    with api(say("")) as (client, _):
        response = client.get(f"/v1/models/{name}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
