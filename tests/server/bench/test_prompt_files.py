"""Stored prompts and traces: what is read, and what is said of files that can't be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.bench.prompt_files import FileError, StoredPrompt, StoredPrompts, TracePrompts, read_prompts, read_trace
from server.bench.workloads import CHAT, COMPLETIONS, Common

COMMON = Common("m", output_len=9)
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
SHAREGPT = {"id": "x", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "why?"},
            {"from": "gpt", "value": "because" * 8}, {"from": "human", "value": "?"}]}  # fmt: skip


def write(path: Path, *entries: Any, array: bool = False) -> Path:
    file = path / "prompts.jsonl"
    text = json.dumps(entries) if array else "\n".join(json.dumps(entry) + "\n" for entry in entries)
    file.write_text(text)
    return file


@pytest.mark.parametrize("array", [False, True])
def test_prompts_of_every_kind(tmp_path: Path, array: bool) -> None:
    entries = ({"prompt": "hé", "output_len": 3}, {"prompt": [5, 6], "max_tokens": 4}, {"messages": MESSAGES}, SHAREGPT)
    prompts = read_prompts(write(tmp_path, *entries, array=array), None)
    workload = StoredPrompts(COMMON, prompts)
    sent = [workload.prepare(index) for index in range(4)]
    assert [each.kind for each in sent] == ["text", "ids", "messages", "text"]
    assert [each.path for each in sent] == [COMPLETIONS, COMPLETIONS, CHAT, COMPLETIONS]
    assert [each.output_len for each in sent] == [3, 4, 9, 14]  # 56 characters are some 14 tokens
    bodies = [json.loads(b"".join(each.body)) for each in sent]
    assert [each["max_tokens"] for each in bodies] == [3, 4, 9, 14]
    assert (bodies[0]["prompt"], bodies[1]["prompt"], bodies[2]["messages"]) == ("hé", [5, 6], MESSAGES)
    assert bodies[3]["prompt"] == "why?"


def test_texts_as_chat() -> None:
    request = StoredPrompts(COMMON, (StoredPrompt(text="a"),), chat=True).prepare(0)
    assert request.path == CHAT
    assert json.loads(b"".join(request.body))["messages"] == [{"role": "user", "content": "a"}]


def test_a_limit_and_what_is_passed_over(tmp_path: Path) -> None:
    unanswered = {"conversations": [{"from": "gpt", "value": "hello"}, "odd", {"from": "human", "value": "hi"}]}
    file = write(tmp_path, unanswered, {"prompt": "a"}, {"prompt": "b"}, "not read")
    assert [prompt.text for prompt in read_prompts(file, 2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ('{"prompt":"a"}\n{', "line 2: "),
        ("[{]", "the array: "),
        ("[1]", "entry 0: not an object"),
        ('{"prompt":""}', "line 1: has no prompt"),
        ('{"prompt":[1,-1]}', "line 1: has no prompt"),
        ('{"prompt":[1.5]}', "line 1: has no prompt"),
        ('{"prompt":[true]}', "line 1: has no prompt"),
        ('{"messages":[]}', "line 1: has no prompt"),
        ('{"prompt":"a","output_len":0}', "output_len is not a positive number"),
        ('{"prompt":"a","output_len":true}', "output_len is not a positive number"),
        ('{"conversations":[]}', "has no prompts"),
        ("[" * 100_000, "the array: "),
    ],
)
def test_bad_prompts(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(FileError, match=words):
        read_prompts(file, None)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"can't read x\.jsonl: No such file"):
        read_prompts(tmp_path / "x.jsonl", None)
    with pytest.raises(FileError, match="Is a directory"):
        read_trace(tmp_path, None)


def entry(timestamp: float, input_length: int, output_length: int, *hash_ids: int) -> dict[str, Any]:
    lengths = {"input_length": input_length, "output_length": output_length}
    return {"timestamp": timestamp, **lengths, "hash_ids": hash_ids}


def test_a_trace(tmp_path: Path) -> None:
    """Times are relative and divided by the speed, lengths are the trace's, and equal blocks hold equal ids."""
    file = write(tmp_path, entry(27_500, 700, 5, 3, 8), entry(27_000, 1024, 7, 3, 4), entry(29_000, 40, 6))
    workload = TracePrompts(COMMON, read_trace(file, None), vocab_size=100)
    assert workload.times(2.0) == (0.0, 0.25, 1.0)
    sent = [workload.prepare(index) for index in range(3)]
    assert [each.output_len for each in sent] == [7, 5, 6]
    prompts = [json.loads(b"".join(each.body))["prompt"] for each in sent]
    assert [len(prompt) for prompt in prompts] == [1024, 700, 40]
    assert prompts[0][:512] == prompts[1][:512] and prompts[0][512:700] != prompts[1][512:]
    assert all(3 <= token < 100 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_length": 0}, "lengths must be positive"),
        ({"output_length": 1 << 30}, "lengths must be positive"),
        ({"timestamp": -1}, "not negative"),
        ({"timestamp": "now"}, "line 1: Expected `float`"),
        ({"hash_ids": [-1]}, "not negative"),
        ({"hash_ids": 7}, "line 1: Expected `array`"),
    ],
)
def test_bad_traces(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FileError, match=words):
        read_trace(write(tmp_path, entry(0, 5, 5) | changes), None)


def test_warming_up_leaves_the_files_prompts_alone() -> None:
    ids = StoredPrompts(COMMON, (StoredPrompt(ids=(5, 90)),)).others(1)
    sent = json.loads(b"".join(ids.prepare(0).body))["prompt"]
    assert max(sent) < 91 and len(sent) == 64
    chat = StoredPrompts(COMMON, (StoredPrompt(messages=({"role": "user"},)),)).others(1)
    assert chat.prepare(0).path == CHAT
