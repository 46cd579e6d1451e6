"""/v1/embeddings and /v1/token_embeddings: what is refused, what the engine is asked, and the arithmetic."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from runner.messages import End
from server import embeddings_input
from server.answer_memory import AnswerMemory
from server.embeddings_input import MAX_INPUTS
from server.errors import EngineFailed, QueueFull, Unavailable
from server.generation import GenerationStream
from server.long_strings import MIN_BYTES
from server.pooling import Dimensions, as_float32, embedding_of, load_pooling
from server.request_context import RequestContext, current_request
from tests.models import HIDDEN_SIZE, VOCAB_SIZE
from tests.server.fakes import MODEL, Api, FakeEngine, StoreHarness, api, ids_of, say, services

EMBEDDINGS, TOKENS = "/v1/embeddings", "/v1/token_embeddings"
CONTEXT = MODEL.max_model_len
ROWS = base64.b64encode(save({"rows": np.zeros((3, HIDDEN_SIZE), np.float32)})).decode()
PART = {"type": "prompt_embeds", "data": ROWS}

# what is sent (beside an input), the field that the error names, its code
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({"input": value}, "input", "invalid_value") for value in (
        None, "", [], 5, True, {"a": 1}, [5, "x"], [True], [1.0], [None], [{"type": "text", "text": ""}],
    )),
    *(({"input": value}, "input[1]", "invalid_value") for value in (["x", ""], ["x", []], [[5], [-1]],
        [[5], [VOCAB_SIZE]], [[5], [2**70]], [[5], [5.0]], [[5], [[5]]], ["x", [{"type": "text", "text": ""}]])),
    ({"input": [5] * (CONTEXT + 1)}, "input", "context_length_exceeded"),
    ({"input": ["x", [5] * (CONTEXT + 1)]}, "input[1]", "context_length_exceeded"),
    ({"input": [-1] * (CONTEXT + 1)}, "input", "context_length_exceeded"),  # counted, not looked at
    ({"input": [*[5] * MAX_INPUTS, "x"]}, "input", "context_length_exceeded"),
    ({"input": "x" * 100_000}, "input", "context_length_exceeded"),
    ({"input": [[5]] * (MAX_INPUTS + 1)}, "input", "invalid_value"),
    ({"input": [[{"type": "text", "text": "x"}] * 2049] * 2}, "input", "invalid_value"),
    ({"input": [{"type": "token_ids", "token_ids": [-1]}]}, "input[0].token_ids", "invalid_value"),
    ({"input": ["x", [{"type": "prompt_embeds", "data": "!"}]]}, "input[1][0].data", "invalid_value"),
    ({"input": [{"type": "text", "text": "x"}, "x"]}, "input[1]", "invalid_value"),
    ({"input": [{"type": "nonsense"}]}, "input[0].type", "invalid_value"),
    ({"input": [PART], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
    *(({"truncate_prompt_tokens": value}, "truncate_prompt_tokens", "invalid_value") for value in (0, -2, 1.0, "5")),
    ({"truncation_side": "both"}, "truncation_side", "invalid_value"),
    *(({"encoding_format": value}, "encoding_format", "invalid_value") for value in ("int8", 5, "")),
    *(({"dimensions": value}, "dimensions", "invalid_value") for value in (0, -1, 1.0, True, 2**31)),
    ({"dimensions": HIDDEN_SIZE - 1}, "dimensions", "unsupported_parameter"),
    ({"pooling": "cls"}, "pooling", "invalid_value"),
    ({"normalize": 1}, "normalize", "invalid_value"),
    ({"user": "x" * 513}, "user", "invalid_value"),
    ({"cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages", "unsupported_parameter"),
    ({"prompt_embeds": ROWS}, "prompt_embeds", "unsupported_parameter"),
    ({"embed_dtype": "float16"}, "embed_dtype", "unsupported_parameter"),
]  # fmt: skip


def test_what_is_refused() -> None:
    with api(say("")) as (client, engine):
        for body, param, code in WRONG:
            response = client.post(EMBEDDINGS, {"input": "x", **body})
            error = response.json()["error"]
            shown = json.dumps(body)[:200]
            assert response.status_code == (404 if code == "model_not_found" else 400), shown
            assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error"), shown
        assert client.post(EMBEDDINGS, {}).status_code == 400
        assert not engine.submitted


def test_what_is_served_at_the_limits() -> None:
    with api(say("")) as (client, engine):
        for body in (
            {"input": [5] * CONTEXT},
            {"input": [[5]] * 40},
            {"input": [5], "dimensions": HIDDEN_SIZE, "user": "x" * 512, "truncate_prompt_tokens": -1},
            {"input": [5], "encoding_format": None, "normalize": None, "pooling": None, "endianness": "little"},
        ):
            assert client.post(EMBEDDINGS, body).status_code == 200
        assert {(each.sampling.max_tokens, each.n) for each in engine.submitted} == {(0, 1)}


@pytest.mark.parametrize("form", ["float", "base64"])
def test_what_answers_hold_is_bounded(form: str) -> None:
    memory = AnswerMemory(40 * HIDDEN_SIZE * 40)
    client = Api(services(FakeEngine(say("")), answer_memory=memory))
    token = current_request.set(RequestContext(""))
    try:
        body = {"input": [[5]] * 40, "encoding_format": form}
        answer = client.post(EMBEDDINGS, body)
        assert answer.status_code == 200
        assert memory.used > len(answer.content) * 0.8
        memory.used = 40 * HIDDEN_SIZE * 39  # others'
        assert client.post(EMBEDDINGS, body).status_code == 429
    finally:
        current_request.reset(token)


def test_embeddings_where_they_are_not_taken() -> None:
    client = Api(services(FakeEngine(say("")), enable_prompt_embeds=False))
    assert client.post(EMBEDDINGS, {"input": [PART]}).status_code == 400


@pytest.mark.parametrize("default", ["mean", "last"])
def test_what_the_engine_is_asked(default: str) -> None:
    engine = FakeEngine(say(""))
    client = Api(services(engine, default_pooling=default))
    client.post(EMBEDDINGS, {"input": "hello", "cache_salt": "s"})
    client.post(EMBEDDINGS, {"input": [5, 6], "pooling": "mean"})
    client.post(EMBEDDINGS, {"input": [5, 6], "pooling": "last"})
    assert [each.sampling.return_hidden_states for each in engine.submitted] == [default, "mean", "last"]
    assert [each.cache_salt for each in engine.submitted] == ["s", "", ""]
    assert engine.submitted[0].prompt.token_ids.tolist() == ids_of("hello")


def test_a_refusal_on_the_way_ends_the_request() -> None:
    """What was queued before is not left behind."""
    engine = FakeEngine(say(""), refuse=[None, None, Unavailable("no")], hang=True)
    response = Api(services(engine)).post(EMBEDDINGS, {"input": [[5]] * 8})
    assert response.status_code == 503
    assert len(engine.submitted) >= 2
    assert all(each.aborted for each in engine.submitted)


class NarrowEngine(FakeEngine):
    """Takes so many requests at once, as for an API key with a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(say(""))
        self.limit, self.refused = limit, 0
        self.streams: list[GenerationStream] = []

    async def generate(self, *args: Any, **options: Any) -> GenerationStream:
        if sum(not stream.has_ended for stream in self.streams) >= self.limit:
            self.refused += 1
            raise QueueFull("This API key may have few requests running at once.")
        self.streams.append(await super().generate(*args, **options))
        return self.streams[-1]


@pytest.mark.parametrize("limit", [0, 1, 3, 40])
def test_inputs_wait_for_each_other_where_a_key_has_few_at_once(limit: int) -> None:
    """A batch of more inputs than the limit could never be answered otherwise."""
    engine = NarrowEngine(limit)
    response = Api(services(engine)).post(EMBEDDINGS, {"input": [[5] * (1 + each) for each in range(60)]})
    if not limit:
        assert response.status_code == 429
        return
    assert response.status_code == 200
    assert sorted(len(each.prompt) for each in engine.submitted) == list(range(1, 61))
    assert engine.refused <= 32
    alone = Api(services(FakeEngine(say("")))).post(EMBEDDINGS, {"input": [[5] * (1 + each) for each in range(60)]})
    assert response.json()["data"] == alone.json()["data"]


def test_stored_rows_count_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming them costs a client nothing, however many they are."""
    monkeypatch.setattr(embeddings_input, "MAX_TOTAL_ROWS", 9)
    harness, engine = StoreHarness(), FakeEngine(say(""))
    client = Api(services(engine, stored=harness.stored))
    file = save({"rows": np.ones((5, HIDDEN_SIZE), np.float32)})
    stored = client.post("/v1/prompt_embeds", content=file, headers={"content-type": "application/octet-stream"})
    part = {"type": "prompt_embeds", "id": stored.json()["id"]}
    assert client.post(EMBEDDINGS, {"input": [[part]]}).status_code == 200
    error = client.post(EMBEDDINGS, {"input": [[part], [part]]}).json()["error"]
    assert "at most 9 tokens in all" in error["message"]


def test_tensors_in_fields_of_their_own() -> None:
    """A multipart body; and a long embedding in JSON, which is decoded from the body's bytes."""
    engine = FakeEngine(say(""))
    client = Api(services(engine))
    file = save({"rows": np.ones((3, HIDDEN_SIZE), np.float32)})
    body = {"input": [[{"type": "text", "text": "hello"}, {"type": "prompt_embeds", "part": "mine"}], "hello"]}
    response = client.post(EMBEDDINGS, None, files={"request": json.dumps(body), "mine": file})
    assert response.status_code == 200, response.text
    assert [len(each.prompt) for each in engine.submitted] == [len(ids_of("hello")) + 3, len(ids_of("hello"))]
    unnamed = client.post(EMBEDDINGS, None, files={"request": json.dumps({"input": "x"}), "mine": file})
    assert unnamed.status_code == 400
    long = base64.b64encode(save({"rows": np.ones((CONTEXT, HIDDEN_SIZE * 4), np.float16)})).decode()
    assert len(long) > MIN_BYTES
    response = client.post(EMBEDDINGS, {"input": [{"type": "prompt_embeds", "data": long}]})
    assert "256 wide" in response.json()["error"]["message"]
    fits = base64.b64encode(save({"rows": np.ones((CONTEXT * 4 // 5, HIDDEN_SIZE), np.float32)})).decode()
    client.post(EMBEDDINGS, {"input": [{"type": "prompt_embeds", "data": fits}]})
    assert len(engine.submitted[-1].prompt) == CONTEXT * 4 // 5


def test_an_engine_that_fails_or_sends_nothing() -> None:
    class Silent(FakeEngine):
        @staticmethod
        def _add_hidden(inbox: Any, choice: int, start: int, count: int) -> None:
            pass

    for engine in (Silent(say("")), _Failing(say(""))):
        response = Api(services(engine)).post(EMBEDDINGS, {"input": [[5], [6]]})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")


def test_an_engine_that_lets_go_of_the_request() -> None:
    class Aborting(FakeEngine):
        async def _run(self, inbox: Any, submitted: Any) -> None:
            inbox.add_end(End(inbox.request, 0, "abort"))

    response = Api(services(Aborting(say("")))).post(EMBEDDINGS, {"input": [[5], [6]]})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert "Retry-After" in response.headers


class _Failing(FakeEngine):
    async def _run(self, inbox: Any, submitted: Any) -> None:
        inbox.fail(EngineFailed())


def test_strict_parameters() -> None:
    client = Api(services(FakeEngine(say("")), strict_params=True))
    for path in (EMBEDDINGS, TOKENS):
        error = client.post(path, {"input": "x", "inputs": "x"}).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", "inputs")


# --- the arithmetic -------------------------------------------------------------------------------------------------


def test_values_of_every_dtype() -> None:
    values = torch.randn(HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)) * 10
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        row = values.to(dtype)
        name = str(dtype).removeprefix("torch.")
        data = row.view(torch.uint8).numpy().tobytes()
        assert as_float32(data, name).tolist() == row.float().tolist()
        cut = embedding_of(data, name, dimensions=16, normalize=True)
        expected = row.float()[:16] / row.float()[:16].norm()
        torch.testing.assert_close(torch.from_numpy(cut), expected)
        assert embedding_of(data, name, dimensions=16, normalize=False).tolist() == row.float()[:16].tolist()


def test_nothing_has_no_direction() -> None:
    assert embedding_of(b"\0" * 8, "float32", dimensions=2, normalize=True).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_no_embedding(value: float) -> None:
    row = np.array([1.0, 2.0, value], np.float32).tobytes()
    for normalize in (True, False):
        with pytest.raises(ValueError):
            embedding_of(row, "float32", dimensions=3, normalize=normalize)
        assert np.isfinite(embedding_of(row, "float32", dimensions=2, normalize=normalize)).all()


@pytest.mark.parametrize(
    ("config", "configured", "expected"),
    [
        (None, "auto", "mean"),
        (None, "last", "last"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "auto", "last"),
        ({"pooling_mode_lasttoken": True}, "mean", "mean"),
        ({"pooling_mode_mean_tokens": True}, "auto", "mean"),
        ({"pooling_mode": "lasttoken"}, "auto", "last"),
        ({"pooling_mode_cls_token": True}, "auto", "mean"),
        ([5], "auto", "mean"),
    ],
)
def test_the_default_pooling(tmp_path: Path, config: Any, configured: str, expected: str) -> None:
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert load_pooling(tmp_path, configured) == expected


def test_cut_embeddings(tmp_path: Path) -> None:
    """Only of a model that says it can; then the rest is of length 1 again."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"matryoshka_dimensions": [16, 32]}))
    assert Dimensions.load(tmp_path) == Dimensions(lengths=(16, 32))
    config.write_text(json.dumps({"is_matryoshka": True}))
    assert Dimensions.load(tmp_path) == Dimensions(any_length=True)
    config.write_text("{}")
    assert Dimensions.load(tmp_path) == Dimensions()
    for dimensions, served, refused in (
        (Dimensions(lengths=(16, 32)), [16, 32, HIDDEN_SIZE], [15, HIDDEN_SIZE + 1]),
        (Dimensions(any_length=True), [1, 16, HIDDEN_SIZE], [HIDDEN_SIZE + 1]),
    ):
        client = Api(services(FakeEngine(say("")), dimensions=dimensions))
        for asked in served:
            found = client.post(EMBEDDINGS, {"input": [5], "dimensions": asked}).json()["data"][0]["embedding"]
            assert len(found) == asked
        for asked in refused:
            error = client.post(EMBEDDINGS, {"input": [5], "dimensions": asked}).json()["error"]
            assert (error["param"], error["code"]) == ("dimensions", "invalid_value")


# --- /v1/token_embeddings ---------------------------------------------------------------------------------------------


def test_token_embeddings() -> None:
    with api(say("")) as (client, _):
        answer = client.post(TOKENS, {"input": [5, 9, 5]}).json()
        rows = load(base64.b64decode(answer["data"]))["rows"]
        assert rows[:, 0].tolist() == [5, 9, 5]
        for accept in ("application/octet-stream", "text/html, Application/Octet-Stream;q=0.9", "*/*", "nonsense,,;"):
            response = client.post(TOKENS, {"input": [5]}, headers={"accept": accept})
            assert response.status_code == 200
            raw = "octet" in accept.lower()
            assert response.headers["content-type"] == ("application/octet-stream" if raw else "application/json")
            file = response.content if raw else base64.b64decode(response.json()["data"])
            assert load(file)["rows"][:, 0].tolist() == [5]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        [],
        5,
        True,
        {},
        [True],
        [1.0],
        [-1],
        [VOCAB_SIZE],
        [2**70],
        ["x"],
        [[5]],
        [5] * (CONTEXT + 1),
        "x" * 9999,
    ],
)
def test_token_embeddings_refused(value: Any) -> None:
    with api(say("")) as (client, _):
        response = client.post(TOKENS, {"input": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "input"
        assert client.post(TOKENS, {"input": "x", "model": "other"}).status_code == 404


def test_ids_that_are_too_many_are_not_looked_at() -> None:
    """A few millions take tenths of a second."""
    with api(say("")) as (client, _):
        for path, name in ((TOKENS, "input"), ("/detokenize", "tokens")):
            assert str(CONTEXT) in client.post(path, {name: [-1] * (CONTEXT + 1)}).json()["error"]["message"]


def test_more_rows_than_an_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.rows_out.MAX_ROW_BYTES", 10 * HIDDEN_SIZE * 4)
    with api(say("")) as (client, _):
        assert client.post(TOKENS, {"input": [5] * 10}).status_code == 200
        error = client.post(TOKENS, {"input": [5] * 11}).json()["error"]
        assert error["param"] == "input" and "10 rows" in error["message"]


def test_rows_of_16_bits() -> None:
    """The file says which kind."""
    model = msgspec.structs.replace(MODEL, dtype="bfloat16", embedding_scale=8.0)

    class Engine(FakeEngine):
        async def token_rows(self, token_ids: Any) -> list[bytes]:
            return [torch.full((HIDDEN_SIZE,), 1.5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()]

    client = Api(services(Engine(say("")), model=model))
    from safetensors.torch import load as load_torch

    file = client.post(TOKENS, {"input": [5]}, headers={"accept": "application/octet-stream"}).content
    assert torch.equal(load_torch(file)["rows"], torch.full((1, HIDDEN_SIZE), 1.5, dtype=torch.bfloat16))
    described = client.get(TOKENS).json()
    assert (described["dtype"], described["scale"]) == ("bfloat16", 8.0)
