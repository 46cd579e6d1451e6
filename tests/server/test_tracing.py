"""Traces, as a collector gets them: a real OTLP/HTTP receiver, which decodes the protobuf."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server import serve_command
from server.cli import build_parser
from tests.models import Family
from tests.server.conftest import StartServer
from tests.server.harness import ROOT, ServerProcess, Stream, completion, eventually
from tests.server.scripted_runner import Script

SECRET = "the-secret-of-a-prompt"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
"""The example of the W3C's Trace Context recommendation."""


class Collector:
    """What came, in order."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for group in request.resource_spans:
            self.resources.append({each.key: value(each.value) for each in group.resource.attributes})
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def forget(self) -> None:
        for each in (self.bodies, self.resources, self.spans):
            each.clear()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def value(each: AnyValue) -> Any:
    kind = each.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in each.array_value.values]
    return getattr(each, str(kind))


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: value(each.value) for each in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(
    collector: Collector, tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    script = Script(model=str(tiny_model("llama")), step_seconds=0.005)
    options: dict[str, Any] = {"api_workers": 2, "otlp_traces_endpoint": collector.url}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms
        patch.setenv("OTEL_SERVICE_NAME", "tested")
        with ServerProcess(script, tmp_path_factory.mktemp("traced"), **options) as server:
            yield server.wait_ready()


@pytest.fixture(autouse=True)
def nothing_came(collector: Collector) -> None:
    collector.forget()


def test_one_span_a_request(server: ServerProcess, collector: Collector) -> None:
    told = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    body = completion(5, n=2, temperature=0.5, top_k=7, user=SECRET, prompt=[9, 8, 7, 6])
    answer = httpx.post(server.base + "/v1/completions", json=body, headers=told, timeout=60)
    assert answer.status_code == 200
    (span,) = eventually(lambda: collector.named("text_completion scripted"))
    found = attributes(span)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert span.kind == Span.SPAN_KIND_SERVER and span.status.code == Status.STATUS_CODE_UNSET
    assert found.pop("intarsia.request.id") == answer.headers["x-request-id"]
    duration = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < found.pop("intarsia.time_to_first_token") < duration
    assert found.pop("intarsia.queue_seconds") == 0.001  # as the scripted runner says
    assert found == {
        "server.address": "127.0.0.1",
        "server.port": server.port,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "intarsia",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stream": False,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    slot, token = span.events
    assert (slot.name, token.name) == ("first_slot", "first_token")
    assert span.start_time_unix_nano < slot.time_unix_nano <= token.time_unix_nano < span.end_time_unix_nano
    assert collector.paths == {"/v1/traces"}
    assert all(each["service.name"] == "tested" for each in collector.resources)


def test_streams_errors_and_clients_that_leave(server: ServerProcess, collector: Collector) -> None:
    server.open_stream(5).rest()
    leaving = server.open_stream(400, user=SECRET)
    next(leaving.events)
    leaving.close()
    assert server.complete(1, stop=[SECRET], temperature=9).status_code == 400
    with server.client() as client:
        assert client.get(f"/{SECRET}").status_code == 404
        messages = [{"role": "user", "content": SECRET}]
        chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert chat.status_code == 200
        for path in ("/metrics", "/readyz", "/livez"):
            assert client.get(path).status_code == 200
    eventually(lambda: len(collector.spans) >= 5)
    whole, gone = sorted(collector.named("text_completion scripted"), key=lambda span: span.start_time_unix_nano)
    assert attributes(whole)["gen_ai.request.stream"] is True
    assert attributes(whole)["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes(gone)["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes(gone)["http.response.status_code"] == 499
    assert attributes(gone)["error.type"] == "client_left"
    assert "error.type" not in attributes(whole)
    (bad,) = collector.named("text_completion")
    assert attributes(bad)["error.type"] == "invalid_value"
    assert bad.status.code == Status.STATUS_CODE_UNSET, "a client's mistake is not the server's error"
    assert not bad.parent_span_id and not bad.events
    (unknown,) = collector.named("GET")
    assert "http.route" not in attributes(unknown)
    (chatted,) = collector.named("chat scripted")
    assert attributes(chatted)["gen_ai.operation.name"] == "chat"
    assert len(collector.spans) == 5, "probes and scrapes are not traced"
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_sampling_is_the_environment_s_business_and_the_last_spans_are_sent_at_the_end(
    start_server: StartServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    server = start_server(otlp_traces_endpoint=collector.url).wait_ready()
    assert server.complete(1).status_code == 200
    Stream(server.port, "/v1/completions", completion(1), {"traceparent": f"00-{TRACE}-{PARENT}-01"}).rest()
    server.signal(signal.SIGTERM)  # Long before the five seconds after which spans are sent otherwise.
    assert server.exit_status() == 0
    assert [span.trace_id.hex() for span in collector.spans] == [TRACE]


def test_a_dead_collector_harms_nobody(start_server: StartServer) -> None:
    server = start_server(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces").wait_ready()
    assert server.complete(3).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_without_the_flag_the_sdk_is_not_imported() -> None:
    program = (
        "import sys, server.worker, server.serve; from server.worker import Worker, WorkerSpec;"
        "from server.config import ServerConfig;"
        "spec = WorkerSpec(ServerConfig(), '/tmp');"
        "from server.metrics import Metrics; from server.shared_cells import SharedCells;"
        "Worker(spec, SharedCells(1, Metrics.CELLS));"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []


def test_without_the_extra_the_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_command, "is_installed", lambda: False)
    arguments = build_parser().parse_args(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"])
    assert serve_command.run(arguments) == 3
    assert "intarsia[otel]" in capsys.readouterr().err
