"""`prompt` as a list of parts, end to end but for the engine: the rows that become of it, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from openai.types import Completion
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from runner.messages import EMBEDDING_ID, Span
from server.embeddings import decode_base64_embedding
from server.prompt import PromptRows
from server.segments import MAX_PARTS
from server.tokenizer import Tokenizer
from tests.models import BOS, BOS_ID, EOS, EOS_ID, HIDDEN_SIZE, VOCAB_SIZE, build_tokenizer
from tests.server.completion_calls import complete, embedding
from tests.server.fakes import MODEL, Api, FakeEngine, Line, Submitted, api, ids_of, say, services

ROUTE = "/v1/completions"
LONG = msgspec.structs.replace(MODEL, max_model_len=16384)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def ids(*values: int) -> dict[str, Any]:
    return {"type": "token_ids", "token_ids": list(values)}


def rows(count: int, value: float = 0.5) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": embedding(count, value)[0]}


def submitted(prompt: Any, **options: Any) -> list[Submitted]:
    engine = FakeEngine(say(""))
    response = Api(services(engine, **options)).post(ROUTE, {"prompt": prompt})
    assert response.status_code == 200, response.text
    Completion.model_validate(response.json(), strict=True)
    assert response.json()["usage"]["prompt_tokens"] == sum(len(each.prompt) for each in engine.submitted)
    return engine.submitted


def token_ids(prompt: Any, **options: Any) -> list[int]:
    (found,) = submitted(prompt, **options)
    listed: list[int] = found.prompt.token_ids.tolist()
    return listed


def test_rows_are_in_order() -> None:
    parts = [text("ques"), rows(3, 0.25), rows(1, 2.0), ids(7, 8), text("tion"), rows(2, 0.5)]
    (found,) = submitted(parts)
    before = ids_of("ques")
    middle = [7, 8, *ids_of("tion")]
    assert found.prompt.token_ids.tolist() == [*before, *[EMBEDDING_ID] * 4, *middle, *[EMBEDDING_ID] * 2]
    start = len(before)
    spans = (Span(start, 3), Span(start + 3, 1), Span(start + 4 + len(middle), 2))
    assert found.prompt.spans == spans
    arrays = [embedding(3, 0.25)[1], embedding(1, 2.0)[1], embedding(2, 0.5)[1]]
    assert [bytes(each) for each in found.prompt.rows] == [array.tobytes() for array in arrays]
    assert len(found.prompt.row_digests) == 6 * 16
    (whole,) = submitted([rows(3, 0.25)])
    assert found.prompt.row_digests.startswith(whole.prompt.row_digests)


def test_rows_are_not_copied() -> None:
    decoded = [
        decode_base64_embedding(embedding(n)[0], hidden_size=HIDDEN_SIZE, dtype="float32", max_rows=9) for n in (2, 3)
    ]
    made = PromptRows.from_segments([decoded[0], [5, 6], decoded[1]])
    assert all(mine is given.data for mine, given in zip(made.rows, decoded, strict=True))
    assert made.tail_ids.tolist() == []
    assert PromptRows.from_segments([decoded[0], [5, 6]]).tail_ids.tolist() == [5, 6]
    assert PromptRows.from_segments([[4], [5, 6]]).tail_ids.tolist() == [4, 5, 6]
    assert np.shares_memory(np.frombuffer(made.rows[0], np.uint8), np.frombuffer(decoded[0].data, np.uint8))


def test_one_kind_alone_is_as_without_parts() -> None:
    assert token_ids([text("What is it?")]) == token_ids("What is it?")
    assert token_ids([ids(5, 6)]) == token_ids([ids(5), ids(6)]) == [5, 6]
    assert token_ids([rows(2)]) == [EMBEDDING_ID] * 2


def test_batches() -> None:
    """Of lists of parts, and of lists of ids beside them; prompt_embeds come first as ever."""
    engine = FakeEngine(say(""))
    body = {"prompt": [[text("a"), rows(1)], [5, 6], [ids(9)], [rows(2), ids(9)]], "prompt_embeds": embedding(3)[0]}
    answer = Api(services(engine)).post(ROUTE, {**body, "n": 2}).json()
    assert [len(each.prompt) for each in engine.submitted] == [3, 2, 2, 1, 3]
    assert len(answer["choices"]) == 10
    assert answer["usage"]["prompt_tokens"] == 11


def with_special_tokens() -> Tokenizer:
    """One that puts special tokens around a text."""
    own = build_tokenizer()
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} {BOS} $A {EOS}", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    return Tokenizer(own)


def test_special_tokens_go_before_a_first_text_only() -> None:
    own = with_special_tokens()
    begin, a, b = [BOS_ID, BOS_ID], ids_of("a"), ids_of("b")
    row = EMBEDDING_ID
    assert token_ids("a", tokenizer=own) == [*begin, *a, EOS_ID]
    assert token_ids([text("a")], tokenizer=own) == [*begin, *a, EOS_ID]
    assert token_ids([text("a"), rows(1), text("b")], tokenizer=own) == [*begin, *a, row, *b]
    assert token_ids([text("a"), text("a")], tokenizer=own) == [*begin, *a, *a]
    assert token_ids([text("a" * 5000), rows(1)], tokenizer=own, model=LONG)[:2] == begin
    assert token_ids([text(""), rows(1)], tokenizer=own) == [*begin, row]
    assert token_ids([rows(1), text("b")], tokenizer=own) == [row, *b]
    assert token_ids([ids(9), text("b")], tokenizer=own) == [9, *b]
    engine = FakeEngine(say(""))
    body = {"prompt": [text("a"), rows(1)], "add_special_tokens": False}
    Api(services(engine, tokenizer=own)).post(ROUTE, body)
    assert engine.submitted[0].prompt.token_ids.tolist() == [*a, row]


def test_ids_for_the_client() -> None:
    """Null where there is none, as with log-probabilities."""
    prompt = [[ids(5), rows(2), ids(6)], [rows(1)], [ids(7), ids(8)]]
    with api(say("")) as (client, _):
        answer = complete(client, prompt=prompt, return_token_ids=True)
        rendered = client.post(f"{ROUTE}/render", {"prompt": prompt}).json()
    expected = [[5, None, None, 6], None, [7, 8]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected
    assert [each["token_ids"] for each in rendered] == expected
    assert [each["count"] for each in rendered] == [4, 1, 2]
    assert [each["prompt"] is None for each in rendered] == [True, True, False]


def test_logprobs_begin_at_the_answer() -> None:
    with api(say("Paris")) as (client, _):
        logprobs = complete(client, prompt=[text("x"), rows(2)], logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"][:-1]) == "Paris"


def test_prompt_logprobs_cover_every_row() -> None:
    with api(say("")) as (client, engine):
        answer = client.post(ROUTE, {"prompt": [ids(5, 6), rows(2), ids(7)], "prompt_logprobs": 0}).json()
    assert len(answer["choices"][0]["prompt_logprobs"]) == 5
    assert engine.submitted[0].sampling.prompt_logprobs == 0


def test_echo_needs_a_prompt_that_is_all_text() -> None:
    with api(say("!")) as (client, _):
        answer = complete(client, prompt=[text("What "), ids(*ids_of("is"))], echo=True)
    assert answer["choices"][0]["text"] == "What is!"


BAD: list[tuple[Any, str, str]] = [
    ([{}], "prompt[0].type", "invalid_value"),
    ([{"type": 5}], "prompt[0].type", "invalid_value"),
    ([{"type": ["text"]}], "prompt[0].type", "invalid_value"),
    ([{"type": "x" * 10**6}], "prompt[0].type", "invalid_value"),
    ([{"type": "text"}], "prompt[0].text", "invalid_value"),
    ([{"type": "text", "text": None}], "prompt[0].text", "invalid_value"),
    ([{"type": "text", "text": ["x"]}], "prompt[0].text", "invalid_value"),
    ([text("")], "prompt", "invalid_value"),
    ([text(""), text("")], "prompt", "invalid_value"),
    ([{"type": "token_ids"}], "prompt[0].token_ids", "invalid_value"),
    ([ids()], "prompt[0].token_ids", "invalid_value"),
    ([ids(-1)], "prompt[0].token_ids", "invalid_value"),
    ([text("x"), ids(5, VOCAB_SIZE)], "prompt[1].token_ids", "invalid_value"),
    ([{"type": "token_ids", "token_ids": [True]}], "prompt[0].token_ids", "invalid_value"),
    ([{"type": "token_ids", "token_ids": [[5]]}], "prompt[0].token_ids", "invalid_value"),
    ([{"type": "token_ids", "token_ids": "5"}], "prompt[0].token_ids", "invalid_value"),
    ([{"type": "prompt_embeds"}], "prompt[0].data", "invalid_value"),
    ([{"type": "prompt_embeds", "data": [0.5]}], "prompt[0].data", "invalid_value"),
    ([{"type": "prompt_embeds", "data": ""}], "prompt[0].data", "invalid_value"),
    ([text("x"), {"type": "prompt_embeds", "data": "!!!!"}], "prompt[1].data", "invalid_value"),
    ([rows(1), {"type": "prompt_embeds", "data": "AAAA"}], "prompt[1].data", "invalid_value"),
    ([rows(1, float("nan"))], "prompt[0].data", "invalid_value"),
    ([text("x"), "x"], "prompt[1]", "invalid_value"),
    ([text("x"), 5], "prompt[1]", "invalid_value"),
    ([text("x"), [text("x")]], "prompt[1]", "invalid_value"),
    ([text("x"), None], "prompt[1]", "invalid_value"),
    ([5, text("x")], "prompt", "invalid_value"),
    (["x", text("x")], "prompt", "invalid_value"),
    ([[text("x")], "x"], "prompt", "invalid_value"),
    ([[text("x")], []], "prompt", "invalid_value"),
    ([[text("x")], [5, text("x")]], "prompt", "invalid_value"),
    ([[ids(5)], [ids(5), ids(VOCAB_SIZE)]], "prompt[1][1].token_ids", "invalid_value"),
    ([[ids(5)], [rows(1), {"type": "prompt_embeds", "data": "AAAA"}]], "prompt[1][1].data", "invalid_value"),
    (text("x"), "prompt", "invalid_value"),
    ([[text("x"), {"type": "prompt_embeds"}]], "prompt[0][1].data", "invalid_value"),
    ([text("")] * (MAX_PARTS + 1), "prompt", "invalid_value"),
    ([[text("x")] * 4] * 1024 + [[ids(5)]], "prompt", "invalid_value"),
    ([[text("x")] * (MAX_PARTS // 2), [text("x")] * (MAX_PARTS // 2 + 1)], "prompt", "invalid_value"),
    ([{"type": "prompt_embeds", "id": "emb_1"}], "prompt[0].id", "unsupported_parameter"),
    ([{"type": "prompt_embeds", "id": 5}], "prompt[0].id", "invalid_value"),
    ([{"type": "prompt_embeds", "id": "e" * 65}], "prompt[0].id", "invalid_value"),
    ([{**rows(1), "id": "emb_1"}], "prompt[0]", "invalid_value"),
    ([{"type": "prompt_embeds", "id": "emb_1", "part": "a"}], "prompt[0]", "invalid_value"),
    ([text("x"), {"type": "prompt_embeds", "part": "a"}], "prompt[1].part", "invalid_value"),
    ([{**rows(2), "token_ids": [5]}], "prompt[0].token_ids", "invalid_value"),
    ([ids(5), {**rows(1), "token_ids": [5, None]}], "prompt[1].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": []}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": [VOCAB_SIZE]}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": [-1]}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": [True]}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": ["5"]}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": [[5]]}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": {}}], "prompt[0].token_ids", "invalid_value"),
    ([{**rows(1), "token_ids": 5}], "prompt[0].token_ids", "invalid_value"),
    ([[ids(5)], [{**rows(1), "token_ids": [5] * 200}]], "prompt[1][0].token_ids", "invalid_value"),
    ([{"type": "soft_prompt"}], "prompt[0].name", "invalid_value"),
    ([{"type": "soft_prompt", "name": ["a"]}], "prompt[0].name", "invalid_value"),
    ([{"type": "soft_prompt", "name": ""}], "prompt[0].name", "invalid_value"),
    ([{"type": "image_url", "image_url": {"url": "data:"}}], "prompt[0].type", "unsupported_parameter"),
    ([ids(*[5] * 100), ids(*[5] * 29)], "prompt", "context_length_exceeded"),
    ([rows(100), ids(*[5] * 29)], "prompt[0].data", "context_length_exceeded"),
    ([rows(64), rows(65)], "prompt[1].data", "context_length_exceeded"),
    ([rows(64), rows(64)], "prompt", "context_length_exceeded"),  # leaves no room for an answer
    ([ids(*[5] * 127), rows(1), rows(1)], "prompt", "context_length_exceeded"),
    ([text("x y " * 10**6)], "prompt[0].text", "context_length_exceeded"),
]


@pytest.mark.parametrize(("prompt", "param", "code"), BAD, ids=range(len(BAD)))
def test_hostile_parts(prompt: Any, param: str, code: str) -> None:
    engine = FakeEngine(say(""))
    client = Api(services(engine))
    for route in (ROUTE, f"{ROUTE}/render"):
        response = client.post(route, {"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert len(error["message"]) < 500
    assert not engine.submitted


def test_what_does_not_go_with_parts() -> None:
    client = Api(services(FakeEngine(say(""))))
    for options, param in (({"echo": True}, "echo"), ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens")):
        body = {"prompt": [[5], [text("x"), rows(1)]], **options}
        assert client.post(ROUTE, body).json()["error"]["param"] == param
    assert client.post(ROUTE, {"prompt": [text("x")], "truncate_prompt_tokens": 1}).status_code == 400
    without = Api(services(FakeEngine(say("")), enable_prompt_embeds=False))
    assert without.post(ROUTE, {"prompt": [text("x"), rows(1)]}).json()["error"]["param"] == "prompt[1]"
    assert without.post(ROUTE, {"prompt": [text("x"), ids(5)]}).status_code == 200


def test_hints_go_with_their_rows() -> None:
    """One a row, and none where nobody gave one; without any the message is as ever."""
    hinted = {**rows(3), "token_ids": [7, None, 5]}
    (found,) = submitted([ids(9), rows(2), hinted, ids(9)])
    assert found.prompt.hint_ids is not None
    assert found.prompt.hint_ids.dtype == np.int32
    assert found.prompt.hint_ids.tolist() == [EMBEDDING_ID, EMBEDDING_ID, 7, EMBEDDING_ID, 5]
    token_ids, digests, hints, *data = found.prompt.frames
    assert np.frombuffer(hints, np.int32).tolist() == found.prompt.hint_ids.tolist()
    assert (len(memoryview(digests).cast("B")), len(data)) == (5 * 16, 2)
    (plain,) = submitted([ids(9), rows(2), rows(3), ids(9)])
    assert plain.prompt.hint_ids is None and len(plain.prompt.frames) == 4
    assert plain.prompt.row_digests == digests
    assert plain.prompt.token_ids.tolist() == np.frombuffer(token_ids, np.int32).tolist()


def test_nothing_is_decoded_before_the_cheap_parts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("server.inputs.decode_base64_embedding", decode)
    client = Api(services(FakeEngine(say(""))))
    hinted = {**rows(1), "token_ids": [VOCAB_SIZE]}
    for last in (ids(VOCAB_SIZE), ids(*[5] * 128), text(" x" * 200), {"type": "text"}, hinted):
        assert client.post(ROUTE, {"prompt": [[rows(1)], [rows(1), last]]}).status_code == 400


def test_an_answer_begins_as_behind_the_last_ids() -> None:
    """Tokenizers whose tokens are not bytes have to know what stood before: with nothing, there is no space."""
    own = build_tokenizer()
    own.backend_tokenizer.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(own)
    assert not tokenizer.vocabulary.is_exact
    word = ids_of("What")[0]
    texts = []
    for prompt in ([5], [rows(2), ids(5)], [ids(5), rows(2)]):
        client = Api(services(FakeEngine(lambda _prompt, _choice: Line([word, EOS_ID])), tokenizer=tokenizer))
        texts.append(client.post(ROUTE, {"prompt": prompt}).json()["choices"][0]["text"])
    assert texts[0] == texts[1] == " " + texts[2]
