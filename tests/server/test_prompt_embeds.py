"""/v1/prompt_embeds and the parts that name what is kept there: routes, the real store, no sockets in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from openai.pagination import SyncConversationCursorPage

from runner.messages import Span, StoreAnswer
from server.embeddings import decode_embedding
from server.questions import Questions
from server.request_context import RequestContext, current_request
from server.stored_embeddings import StoredEmbeddings
from tests.models import HIDDEN_SIZE
from tests.server.fakes import MODEL, Api, FakeEngine, StoreHarness, ids_of, say, services

ROUTE = "/v1/prompt_embeds"
RAW = {"Content-Type": "application/octet-stream"}


def array(count: int, value: float = 0.5) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full((count, HIDDEN_SIZE), value, np.float32)


def payload(count: int, value: float = 0.5) -> bytes:
    return safetensors.numpy.save({"rows": array(count, value)})


class Server:
    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine(say("x"))
        self.harness = StoreHarness(**options)
        self.api = Api(services(self.engine, stored=self.harness.stored))

    def upload(self, count: int, value: float = 0.5) -> dict[str, Any]:
        response = self.api.post(ROUTE, content=payload(count, value), headers=RAW)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def list(self, query: str = "") -> dict[str, Any]:
        response = self.api.get(ROUTE + query)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


@contextmanager
def key(number: int | None) -> Iterator[None]:
    """Requests come with this API key."""
    context = RequestContext(id="r")
    context.api_key = number
    token = current_request.set(context)
    try:
        yield
    finally:
        current_request.reset(token)


def error(response: httpx.Response) -> tuple[int, str | None, str | None]:
    found = response.json()["error"]
    return response.status_code, found["param"], found["code"]


def stored(value: str) -> dict[str, Any]:
    return {"type": "prompt_embeds", "id": value}


# --- the routes -----------------------------------------------------------------------------------------------------


def test_an_upload_tells_what_is_kept() -> None:
    server = Server(wall_clock=lambda: 1000.0)
    body = server.upload(3)
    assert body == {
        "id": body["id"],
        "object": "prompt_embeds",
        "rows": 3,
        "hidden": HIDDEN_SIZE,
        "dtype": MODEL.dtype,
        "sha256": sha256(array(3).tobytes()).hexdigest(),
        "created_at": 1000,
        "expires_at": 4600,
    }
    assert body["id"].startswith("emb_")
    assert server.api.get(f"{ROUTE}/{body['id']}").json() == body


@pytest.mark.parametrize("with_json", [False, True])
def test_a_form_is_an_upload_too(with_json: bool) -> None:
    server = Server()
    files = {"file": payload(3)} | ({"request": b'{"model": "tiny"}'} if with_json else {})
    response = server.api.post(ROUTE, content=None, files=files)
    assert response.status_code == 200, response.text
    assert response.json() == server.upload(3) | {"expires_at": response.json()["expires_at"]}


def test_what_is_kept_is_in_the_models_dtype() -> None:
    """So the same rows in another dtype, or in another file, are the same embedding."""
    server = Server()
    half = safetensors.numpy.save({"a": array(2).astype(np.float16)}, {"by": "another"})
    assert server.api.post(ROUTE, content=half, headers=RAW).json()["id"] == server.upload(2)["id"]
    assert len(server.harness.store) == 1


def test_lists_are_openais() -> None:
    server = Server()
    ids = [server.upload(1, number)["id"] for number in range(5)]
    assert [each["id"] for each in server.list()["data"]] == ids[::-1]
    assert [each["id"] for each in server.list("?order=asc&limit=5")["data"]] == ids
    page = server.list("?limit=2")
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[4], ids[3], True)
    assert SyncConversationCursorPage[Any].model_validate(page).has_next_page()
    page = server.list(f"?limit=3&after={ids[3]}")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[2::-1], False)
    assert Server().list() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_deleted() -> None:
    server = Server()
    name = server.upload(1)["id"]
    deleted = server.api.delete(f"{ROUTE}/{name}")
    assert deleted.json() == {"id": name, "object": "prompt_embeds", "deleted": True}
    for response in (server.api.get(f"{ROUTE}/{name}"), server.api.delete(f"{ROUTE}/{name}")):
        assert error(response) == (404, "id", "prompt_embeds_not_found")
    assert error(server.api.get(f"{ROUTE}?after={name}")) == (404, "after", "prompt_embeds_not_found")
    assert server.list()["data"] == []


def test_each_key_has_its_own() -> None:
    server = Server()
    with key(0):
        mine = server.upload(1)["id"]
    for other in (1, 2):
        with key(other):
            assert server.list()["data"] == []
            for response in (server.api.get(f"{ROUTE}/{mine}"), server.api.delete(f"{ROUTE}/{mine}")):
                assert error(response)[0] == 404
            assert error(server.api.post("/v1/completions", {"prompt": [stored(mine)]}))[0] == 404
            assert server.upload(1)["id"] != mine
    with key(0):
        assert server.api.get(f"{ROUTE}/{mine}").status_code == 200
        assert server.api.post("/v1/completions", {"prompt": [stored(mine)]}).status_code == 200


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "limit=x", "limit=-1", "limit=", "order=up", "order="],
)
def test_queries_that_are_refused(query: str) -> None:
    assert error(Server().api.get(f"{ROUTE}?{query}")) == (400, query.partition("=")[0], "invalid_value")


@pytest.mark.parametrize("name", ["emb_1", "x" * 5000, "emb_%00", "ü"])
def test_ids_that_nobody_has(name: str) -> None:
    server = Server()
    server.upload(1)
    assert error(server.api.get(f"{ROUTE}/{name}"))[0] == 404
    assert error(server.api.delete(f"{ROUTE}/{name}"))[0] == 404
    assert error(server.api.get(f"{ROUTE}?after={name}"))[0] == 404


BAD_UPLOADS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "nothing": ({"content": b"", "headers": RAW}, 400, "file"),
    "not a tensor": ({"content": b"x" * 1000, "headers": RAW}, 400, "file"),
    "NaN": ({"content": payload(1, float("nan")), "headers": RAW}, 400, "file"),
    "more rows than the context": ({"content": payload(129), "headers": RAW}, 400, "file"),
    "JSON": ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, 415, None),
    "compressed": (
        {
            "content": payload(1),
            "headers": {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
        },
        415,
        None,
    ),
    "no type": ({"content": payload(1)}, 415, None),
    "no field": ({"files": {"request": b"{}"}}, 400, "request"),
    "two fields": ({"files": {"a": payload(1), "b": payload(1)}}, 400, "request"),
    "JSON that is none": ({"files": {"a": payload(1), "request": b"{"}}, 400, None),
    "another model": ({"files": {"a": payload(1), "request": b'{"model": "other"}'}}, 404, "model"),
    "a model that is no name": ({"files": {"a": payload(1), "request": b'{"model": 5}'}}, 400, "model"),
}


@pytest.mark.parametrize(("sent", "status", "param"), BAD_UPLOADS.values(), ids=BAD_UPLOADS.keys())
def test_uploads_that_are_refused(sent: dict[str, Any], status: int, param: str | None) -> None:
    server = Server()
    response = server.api.post(ROUTE, **({"content": None} | sent))
    assert error(response)[:2] == (status, param)
    assert len(server.harness.store) == 0


def test_no_room() -> None:
    server = Server(max_bytes=10_000, max_owner_bytes=8_000)
    too_large = server.api.post(ROUTE, content=payload(40), headers=RAW)
    assert error(too_large)[0] == 413
    held = server.harness.store.lease([server.upload(10)["id"]])
    full = server.api.post(ROUTE, content=payload(11), headers=RAW)
    assert error(full)[0] == 429
    assert "retry-after" in full.headers
    server.harness.store.give_back(held)
    server.upload(11)


def test_a_server_that_stores_nothing() -> None:
    api = Api(services(FakeEngine(say(""))))
    answers = [api.post(ROUTE, content=payload(1), headers=RAW), api.get(ROUTE)]
    answers += [api.get(f"{ROUTE}/emb_1"), api.delete(f"{ROUTE}/emb_1")]
    for response in answers:
        assert error(response) == (400, None, "unsupported_parameter")


def test_a_runner_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.questions._ANSWER_SECONDS", 0.05)
    for takes, status in ((True, 503), (False, 429)):
        questions: Questions[StoreAnswer] = Questions(lambda *frames, takes=takes: takes, lambda: None)
        api = Api(services(FakeEngine(say("")), stored=StoredEmbeddings(0, questions, 1 << 20)))
        assert api.get(ROUTE).status_code == status
        assert api.post(ROUTE, content=payload(1), headers=RAW).status_code == status
        assert questions._waiting == {}


# --- the parts ------------------------------------------------------------------------------------------------------


def test_a_stored_part_is_a_span_without_rows() -> None:
    server = Server()
    first, second = server.upload(3, 0.25)["id"], server.upload(2, 2.0)["id"]
    inline = safetensors.numpy.save({"rows": array(1, 4.0)})
    prompt = [stored(first), {"type": "text", "text": "ques"}, {"type": "prompt_embeds", "part": "rows"}]
    prompt += [stored(second), stored(first)]
    files = {"request": httpx.Request("POST", "http://a", json={"prompt": prompt}).read(), "rows": inline}
    response = server.api.post("/v1/completions", content=None, files=files)
    assert response.status_code == 200, response.text
    (found,) = server.engine.submitted
    at = 3 + len(ids_of("ques"))
    starts = ((0, 3, first), (at, 1, ""), (at + 1, 2, second), (at + 3, 3, first))
    spans = tuple(Span(start, length, stored=name) for start, length, name in starts)
    assert found.prompt.spans == spans
    assert [bytes(rows) for rows in found.prompt.rows] == [b"", array(1, 4.0).tobytes(), b"", b""]
    expected = decode_embedding(inline, hidden_size=HIDDEN_SIZE, dtype="float32", max_rows=1)
    assert found.prompt.row_digests == expected.digests
    assert response.json()["usage"]["prompt_tokens"] == at + 6


def test_their_rows_can_have_hints() -> None:
    server = Server()
    name = server.upload(3)["id"]
    prompt = [stored(name) | {"token_ids": [7, None, 9]}, {"type": "token_ids", "token_ids": [5]}, stored(name)]
    assert server.api.post("/v1/completions", {"prompt": prompt}).status_code == 200
    (found,) = server.engine.submitted
    assert found.prompt.hint_ids is not None
    assert found.prompt.hint_ids.tolist() == [7, -1, 9, -1, -1, -1]
    for wrong in ([7], [7, 8, 9, 10], [7, 8, 10**6]):
        response = server.api.post("/v1/completions", {"prompt": [stored(name) | {"token_ids": wrong}]})
        assert error(response) == (400, "prompt[0].token_ids", "invalid_value")


def test_chat_takes_them() -> None:
    server = Server()
    name = server.upload(3)["id"]
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, stored(name)]}]
    response = server.api.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200, response.text
    (span,) = server.engine.submitted[0].prompt.spans
    assert (span.length, span.stored) == (3, name)
    messages = [{"role": "user", "content": [stored("emb_1")]}]
    response = server.api.post("/v1/chat/completions", {"messages": messages})
    assert error(response) == (404, "messages[0].content[0].id", "prompt_embeds_not_found")


def test_unknown_ids() -> None:
    server = Server()
    name = server.upload(1)["id"]
    for prompt, where in (([stored("emb_1")], "prompt[0].id"), ([[5], [stored(name), stored("b")]], "prompt[1][1].id")):
        response = server.api.post("/v1/completions", {"prompt": prompt})
        assert error(response) == (404, where, "prompt_embeds_not_found")
    assert server.engine.submitted == []


def test_their_length_counts_before_anything_is_decoded() -> None:
    server = Server()
    name = server.upload(100)["id"]
    broken = {"type": "prompt_embeds", "data": "AAAA"}
    response = server.api.post("/v1/completions", {"prompt": [stored(name), broken, stored(name)]})
    assert error(response) == (400, "prompt", "context_length_exceeded")


def test_render_tells_their_length() -> None:
    server = Server()
    name = server.upload(3)["id"]
    (body,) = server.api.post(
        "/v1/completions/render", {"prompt": [stored(name), {"type": "token_ids", "token_ids": [5]}]}
    ).json()
    assert body["token_ids"] == [None, None, None, 5]
