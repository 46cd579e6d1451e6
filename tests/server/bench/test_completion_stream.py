"""What is read out of a stream: when tokens came, how many, and each way in which it can go wrong."""

from __future__ import annotations

import json

import pytest

from server.bench.completion_stream import MAX_ERROR_BYTES, CompletionStream
from server.bench.http_connection import CallFailed
from tests.server.bench.scripted_http import DONE, token, usage


def stream_of(*reads: tuple[float, bytes], status: int = 200) -> CompletionStream:
    """Reads at the given times."""
    stream = CompletionStream()
    stream.on_status(status, 0.0)
    for now, data in reads:
        stream.on_body(data, now)
    return stream


def failure(*reads: tuple[float, bytes], status: int = 200) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        stream_of(*reads, status=status).finish()
    return failed.value


def test_times_and_counts() -> None:
    stream = stream_of((1.0, token()), (1.25, token()), (2.0, token() + usage(5, 3) + DONE))
    stream.finish()
    assert (stream.first, stream.last, stream.gaps) == (1.0, 2.0, [0.25, 0.75])
    assert (stream.num_events, stream.prompt_tokens, stream.completion_tokens) == (3, 5, 3)


def test_tokens_of_one_read_came_at_one_time() -> None:
    stream = stream_of((1.0, token()), (2.0, token() + token()), (2.5, DONE))
    stream.finish()
    assert (stream.gaps, stream.last) == ([1.0, 0.0], 2.0)


def test_events_may_be_cut_anywhere() -> None:
    """An event has come when its last byte has."""
    whole = token("é") + usage(1, 1) + DONE
    for cut in range(1, len(whole)):
        stream = stream_of((1.0, whole[:cut]), (2.0, whole[cut:]))
        stream.finish()
        assert stream.first == (1.0 if cut >= len(token("é")) else 2.0)
        assert stream.completion_tokens == 1


def test_other_line_ends_comments_and_fields() -> None:
    text = b": keep-alive\n\nevent: chunk\nid: 7\n" + token() + usage(1, 1) + DONE
    windows = text.replace(b"\n", b"\r\n")
    for cut in range(1, len(windows)):
        stream = stream_of((1.0, windows[:cut]), (1.0, windows[cut:]))
        stream.finish()
        assert (stream.num_events, stream.completion_tokens) == (1, 1)


def test_a_stop_without_text_is_no_token_but_ends_the_answer() -> None:
    last = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
    stream = stream_of((1.0, token()), (2.0, token()), (3.0, last + DONE))
    stream.finish()
    assert (stream.num_events, stream.gaps, stream.last) == (2, [1.0], 3.0)


def test_a_stream_of_textless_tokens_counts_its_events() -> None:
    stream = stream_of((1.0, token("")), (2.0, token("")), (3.0, DONE))
    stream.finish()
    assert (stream.first, stream.last, stream.num_events) == (1.0, 2.0, 2)


def test_chat() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    word = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    thought = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"a"}}]}\n\n'
    stream = stream_of((1.0, role), (2.0, thought), (3.0, word), (4.0, DONE))
    stream.finish()
    assert (stream.first, stream.gaps) == (2.0, [1.0])


def test_cached_tokens() -> None:
    counts = {"prompt_tokens": 8, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    event = b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"
    stream = stream_of((1.0, token() + event + DONE))
    assert stream.cached_tokens == 4


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (token(), "truncated"),
        (token() + DONE[:-1], "truncated"),
        (b"", "truncated"),
        (DONE, "no_tokens"),
        (usage(1, 0) + DONE, "no_tokens"),
        (token() + b"data: {\n\n", "bad_event"),
        (token() + b"data: 7\n\n", "bad_event"),
        (token() + b'data: {"choices":{}}\n\n', "bad_event"),
        (b"data: \xff\n\n", "bad_event"),
        (token() + b'data: {"error":{"message":"x","code":"engine_failed"}}\n\n' + DONE, "stream_error:engine_failed"),
        (token() + b'data: {"error":{"message":"x","code":503}}\n\n' + DONE, "stream_error:503"),
        (token() + b'data: {"error":{"message":"x","code":null}}\n\n' + DONE, "stream_error"),
        (b'event: error\ndata: {"error":"no"}\n\n', "stream_error"),
        (b'data: {"error":[[[]]]}\n\n', "stream_error"),
    ],
)
def test_failures(data: bytes, kind: str) -> None:
    assert failure((1.0, data)).kind == kind


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"too long","code":"context_length_exceeded"}}', "HTTP 400: too long"),
        (b'{"error":"Unauthorized"}', "HTTP 400: Unauthorized"),
        (b'{"object":"error","message":"flat"}', "HTTP 400: flat"),
        (b'{"detail":[{"loc":["body"]}]}', 'HTTP 400: {"detail":[{"loc":["body"]}]}'),
        (b"[1]", "HTTP 400: [1]"),
        (b"<html>Bad gateway", "HTTP 400: <html>Bad gateway"),
        (b"\xff\xfe", "HTTP 400: \ufffd\ufffd"),
        (b"", "HTTP 400:"),
    ],
)
def test_http_errors(body: bytes, words: str) -> None:
    error = failure((1.0, body), status=400)
    assert (error.kind, error.detail) == ("http_400", words)


def test_long_errors_are_cut() -> None:
    stream = stream_of(*[(1.0, b"x" * 10_000)] * 100, status=500)
    assert len(stream._error_body) < MAX_ERROR_BYTES + 10_000
    with pytest.raises(CallFailed) as failed:
        stream.finish()
    assert len(failed.value.detail) < 400
