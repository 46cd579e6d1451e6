"""The Responses API as the openai package's own client uses it: a real server, a scripted runner."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import ResponseCompletedEvent

from tests.server.conftest import StartServer
from tests.server.harness import ServerProcess, Stream, eventually


def connect(server: ServerProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def test_create_retrieve_continue_delete(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="hello", max_output_tokens=8, metadata={"a": "b"})
    assert first.output_text
    assert (first.usage and first.usage.output_tokens, first.metadata) == (8, {"a": "b"})
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        model="scripted", input="more", max_output_tokens=8, previous_response_id=first.id, instructions="Be kind."
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(second.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input="more", previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_streams(client: openai.OpenAI) -> None:
    # The answer is the prompt once more, and then its end.
    with client.responses.stream(model="scripted", input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert isinstance(events[-1], ResponseCompletedEvent)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text != ""
    assert client.responses.retrieve(final.id).output_text == text
    with client.responses.create(model="scripted", input="hello", max_output_tokens=8, stream=True) as raw:
        kinds = [event.type for event in raw]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.incomplete"


def test_a_client_that_hangs_up(server: ServerProcess) -> None:
    aborted = len(server.messages("abort"))
    body = {"input": "hello", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
    with server.held() as step:
        stream = Stream(server.port, "/v1/responses", body)
        step(10)  # the first tokens have no text
        assert any('"response.output_text.delta"' in event for event in stream.events)
        stream.close()
        eventually(lambda: len(server.messages("abort")) > aborted)


def test_what_is_not_done_here(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input="hello", conversation="conv_1")
    assert caught.value.param == "conversation"


def test_a_response_is_for_the_key_that_asked_for_it(start_server: StartServer) -> None:
    server = start_server(api_keys=["mine", "theirs"]).wait_ready()
    with connect(server, "mine") as mine, connect(server, "theirs") as theirs:
        response = mine.responses.create(model="scripted", input="secret", max_output_tokens=4)
        with mine.responses.create(model="scripted", input="secret", max_output_tokens=4, stream=True) as stream:
            streamed = next(each for each in list(stream) if each.type == "response.incomplete").response
        for each in (response, streamed):
            assert mine.responses.retrieve(each.id).id == each.id
            for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(each.id)
            with pytest.raises(openai.BadRequestError, match="not kept"):
                theirs.responses.create(model="scripted", input="x", previous_response_id=each.id)
            assert mine.responses.retrieve(each.id).id == each.id


def test_a_response_is_every_workers(start_server: StartServer) -> None:
    """Each call over a connection of its own, which are dealt out in turn: the runner sees from where they come."""
    server = start_server(api_workers=2, api_keys=["mine", "theirs"]).wait_ready()

    def asked_by(count: int) -> list[int]:
        """The workers that sent the last questions."""
        return [event["worker"] for event in server.messages("record")[-count:]]

    for _ in range(2):  # from the one to the other, and back
        with connect(server, "mine") as mine:
            first = mine.responses.create(model="scripted", input="hello", max_output_tokens=4)
        with connect(server, "mine") as mine:
            assert mine.responses.retrieve(first.id) == first
        assert set(asked_by(2)) == {0, 1}
        with connect(server, "theirs") as theirs, pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(first.id)
        with connect(server, "mine") as mine:
            second = mine.responses.create(
                model="scripted", input="more", max_output_tokens=4, previous_response_id=first.id
            )
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens
        with connect(server, "theirs") as theirs, pytest.raises(openai.NotFoundError):
            theirs.responses.delete(first.id)
        with connect(server, "mine") as mine:
            mine.responses.delete(first.id)
        for _ in range(2):
            with connect(server, "mine") as mine, pytest.raises(openai.NotFoundError):
                mine.responses.retrieve(first.id)
        assert set(asked_by(2)) == {0, 1}
        server.status("/readyz")  # an odd connection, so that the next round begins at the other worker
