"""Responses in the background, through the openai package's client: a real server of two API processes, a scripted
runner. Every call comes over a connection of its own, so that both processes get their share."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from runner.messages import PutRecord, decode_to_runner
from server.background_tasks import BackgroundTasks
from tests.models import Family
from tests.server.conftest import StartServer
from tests.server.fakes import Api, FakeEngine, RecordsHarness, application, say
from tests.server.harness import ServerProcess, eventually
from tests.server.response_events import ROUTE, check_response, given_services
from tests.server.scripted_runner import Script
from tests.server.test_responses_client import connect
from tests.server.test_workers import assert_over, children, workers_of

KEYS = ("mine", "theirs")
ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")))
    folder = tmp_path_factory.mktemp("background")
    with ServerProcess(script, folder, api_workers=2, api_keys=KEYS) as server:
        yield server.wait_ready()


def create(server: ServerProcess, tokens: int, key: str = KEYS[0], **body: Any) -> Response:
    with connect(server, key) as client:
        response: Response = client.responses.create(
            model="scripted",
            input="hello",
            background=True,
            max_output_tokens=tokens,
            extra_body={"ignore_eos": True},
            **body,
        )
    Response.model_validate(response.model_dump(), strict=True)
    return response


def get(server: ServerProcess, response: Response, key: str = KEYS[0]) -> Response:
    with connect(server, key) as client:
        found = client.responses.retrieve(response.id)
    Response.model_validate(found.model_dump(), strict=True)
    return found


def ended_in_process(engine: FakeEngine, records: RecordsHarness) -> dict[str, Any]:
    """A response in the background, once it has ended, without a server around it."""

    async def main() -> dict[str, Any]:
        transport = httpx.ASGITransport(application(given_services(engine, responses=records.responses)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post(ROUTE, json={"input": "hello", "background": True})
            assert answer.status_code == 200, answer.text
            response = check_response(answer.json())
            assert response["status"] == "queued"
            while response["status"] not in ENDED:
                await asyncio.sleep(0.01)
                response = check_response((await client.get(f"{ROUTE}/{response['id']}")).json())
        return response

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_it_ends_well() -> None:
    records = RecordsHarness()
    response = ended_in_process(FakeEngine(say("Good day.")), records)
    assert (response["status"], response["output"][0]["content"][0]["text"]) == ("completed", "Good day.")
    assert len(records.store) == 1


def test_it_fails() -> None:
    response = ended_in_process(FakeEngine(say("Good day to you."), fail_after=3), RecordsHarness())
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"][0]["status"] == "incomplete"


def test_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr("server.responses.create.ResponseAnswer.feed", broken)
    response = ended_in_process(FakeEngine(say("x")), RecordsHarness())
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "secret" not in str(response)


def test_it_becomes_too_large_to_be_kept() -> None:
    response = ended_in_process(FakeEngine(say("Good day. " * 100)), RecordsHarness(max_record_bytes=1850))
    assert (response["status"], response["output"]) == ("failed", [])
    assert "larger than" in response["error"]["message"]


def test_one_that_cannot_be_kept_is_not_made() -> None:
    engine = FakeEngine(say("Good day."))
    client = Api(given_services(engine, responses=RecordsHarness(max_record_bytes=100).responses))
    refused = client.post(ROUTE, {"input": "hello", "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert engine.submitted[0].aborted == [-1]


class BusyRunner(RecordsHarness):
    """Takes (or answers) how a response has ended only when it has been told `times` times before."""

    def __init__(self, times: int, *, answers_late: bool = False) -> None:
        super().__init__()
        self.told = 0
        self._times, self._answers_late = times, answers_late

    def _send(self, *frames: bytes | memoryview) -> bool:
        message = decode_to_runner(frames[0])
        if isinstance(message, PutRecord) and message.replaces and len(frames) == 3:
            self.told += 1
            if self.told <= self._times:
                return False
            if self._answers_late:
                asyncio.get_running_loop().call_later(0.7, super()._send, *frames)
                return True
        return super()._send(*frames)


@pytest.mark.parametrize("fail_after", [None, 3])
def test_how_it_has_ended_is_said_until_the_runner_takes_it(
    fail_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay in progress else, and nobody would be making it."""
    monkeypatch.setattr("server.questions._AGAIN_SECONDS", 0.01)
    records = BusyRunner(5)
    response = ended_in_process(FakeEngine(say("Good day."), fail_after=fail_after), records)
    assert (response["status"], records.told) == ("completed" if fail_after is None else "failed", 6)


def test_how_it_has_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that has taken the message answers some time: that it did not in time is no reason to call a response
    too large that has ended well."""
    monkeypatch.setattr("server.questions._ANSWER_SECONDS", 0.5)
    records = BusyRunner(0, answers_late=True)
    response = ended_in_process(FakeEngine(say("Good day.")), records)
    assert (response["status"], response["store"], records.told) == ("completed", True, 1)


def test_one_that_was_queued_too_late_to_be_told_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has got an error and no id; who would ever ask for it?"""
    monkeypatch.setattr("server.questions._ANSWER_SECONDS", 0.05)

    class Late(RecordsHarness):
        """Answers nothing before it hears what comes after."""

        put: tuple[bytes | memoryview, ...] = ()
        kept = -1

        def _send(self, *frames: bytes | memoryview) -> bool:
            if isinstance(decode_to_runner(frames[0]), PutRecord):
                self.put = frames
                return True
            super()._send(*self.put)
            self.kept = len(self.store)
            return super()._send(*frames)

    records = Late()

    async def main() -> None:
        given = given_services(FakeEngine(say("Good day.")), responses=records.responses)
        ended = asyncio.Event()
        given = replace(given, background=BackgroundTasks(on_end=ended.set))
        transport = httpx.ASGITransport(application(given))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post(ROUTE, json={"input": "hello", "background": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        await ended.wait()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert (records.kept, len(records.store)) == (1, 0)


def test_one_that_is_refused_is_given_up_at_once() -> None:
    """Not when the runner says that it keeps nothing of it, which may take long."""

    class Silent(RecordsHarness):
        """Refuses to keep anything, and says nothing to what comes after."""

        deleting = False

        def _send(self, *frames: bytes | memoryview) -> bool:
            if isinstance(decode_to_runner(frames[0]), PutRecord):
                return super()._send(*frames)
            self.deleting = True
            return True

    engine, records = FakeEngine(say("Good day.")), Silent(max_record_bytes=100)

    async def main() -> None:
        given = given_services(engine, responses=records.responses)
        transport = httpx.ASGITransport(application(given))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post(ROUTE, json={"input": "hello", "background": True})
        assert answer.status_code == 413
        assert records.deleting
        assert engine.submitted[0].aborted == [-1]
        assert given.answer_memory.used == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_from_the_queue_to_the_end(server: ServerProcess) -> None:
    """Nobody holds a connection meanwhile."""
    with server.held() as step:
        queued = create(server, 80, metadata={"a": "b"})
        assert (queued.status, queued.background, queued.output, queued.metadata) == ("queued", True, [], {"a": "b"})
        assert get(server, queued).status == "queued"
        step(10)  # the first tokens have no text
        eventually(lambda: get(server, queued).status == "in_progress")
    eventually(lambda: get(server, queued).status in ENDED)
    done = get(server, queued)
    assert done.status == "incomplete"
    assert done.usage is not None
    assert done.usage.output_tokens == 80
    with connect(server, KEYS[0]) as client:
        whole = client.responses.create(
            model="scripted", input="hello", max_output_tokens=80, extra_body={"ignore_eos": True}
        )
        assert done.output_text == whole.output_text != ""
        following = client.responses.create(
            model="scripted", input="more", max_output_tokens=2, previous_response_id=done.id
        )
    assert following.usage is not None
    assert following.usage.input_tokens > done.usage.total_tokens
    with connect(server, KEYS[0]) as client:
        assert client.responses.cancel(done.id) == done, "it has ended"


def test_cancel(server: ServerProcess) -> None:
    for _ in range(2):  # whichever process it comes to
        with server.held() as step:
            running = create(server, 400)
            step(10)  # the first tokens have no text
            eventually(lambda running=running: get(server, running).status == "in_progress")  # type: ignore[misc]
            with connect(server, KEYS[0]) as client:
                cancelled = client.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        assert get(server, running) == cancelled
        with connect(server, KEYS[0]) as client:
            assert client.responses.cancel(running.id) == cancelled
            with pytest.raises(openai.BadRequestError, match="not ended well") as caught:
                client.responses.create(model="scripted", input="more", previous_response_id=running.id)
        assert caught.value.param == "previous_response_id"
        server.status("/readyz")
    made = [event["found"] for event in server.messages("abort_answer")]
    assert all(len(found) == 1 for found in made[-2:])
    eventually(lambda: '{"server_load":0}' in connectless(server, "/load"))


def connectless(server: ServerProcess, path: str) -> str:
    with server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        return client.get(path).text


def test_it_is_the_key_s_own(server: ServerProcess) -> None:
    with server.held():
        running = create(server, 400)
        with connect(server, KEYS[1]) as client:
            for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(running.id)
        assert get(server, running).status not in ENDED
        with connect(server, KEYS[0]) as client:
            with pytest.raises(openai.BadRequestError, match="not ended well"):
                client.responses.create(model="scripted", input="more", previous_response_id=running.id)
            client.responses.delete(running.id)
    assert len(server.messages("abort_answer")[-1]["found"]) == 1
    eventually(lambda: '{"server_load":0}' in connectless(server, "/load"))
    for _ in range(2):
        with connect(server, KEYS[0]) as client, pytest.raises(openai.NotFoundError):
            client.responses.retrieve(running.id)


@pytest.mark.parametrize(
    ("body", "param"), [({"store": False}, "background"), ({"stream": True}, "background"), ({"input": []}, "input")]
)
def test_bad_requests(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    with server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        answer = client.post("/v1/responses", json={"input": "hello", "background": True, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_a_full_queue_refuses_is_not_kept(server: ServerProcess) -> None:
    before = len(server.messages("record"))
    with server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        refused = client.post("/v1/responses", json={"input": "x" * 5000, "background": True})
    assert refused.status_code == 400  # longer than the context
    assert len(server.messages("record")) == before


def test_a_process_that_dies_leaves_word(start_server: StartServer) -> None:
    server = start_server(api_workers=2).wait_ready()

    def statuses() -> list[str]:
        return sorted(str(get(server, each, "none").status) for each in responses)

    with server.held() as step:
        responses = [create(server, 400, "none") for _ in range(2)]
        assert len(workers_of(server)) == 2
        step(10)  # the first tokens have no text
        eventually(lambda: statuses() == ["in_progress"] * 2)
        (pid,) = children(server)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.messages("gone"))
        eventually(lambda: statuses() == ["failed", "in_progress"])
    lost = next(each for each in responses if get(server, each, "none").status == "failed")
    error = get(server, lost, "none").error
    assert error is not None
    assert (error.code, error.message) == ("server_error", "The server lost this response.")


def test_a_drain_waits_for_it(start_server: StartServer) -> None:
    server = start_server(api_workers=2).wait_ready()
    pids = children(server)
    with server.held():
        create(server, 60, "none")
        server.signal(signal.SIGTERM)
        eventually(lambda: server.status("/readyz") == 503)
    assert server.exit_status() == 0
    assert server.messages("abort") == []
    puts = [event for event in server.messages("record") if event["question"] == "PutRecord"]
    assert len(puts) == 3, "queued, in progress, ended"
    assert_over(server, pids)
