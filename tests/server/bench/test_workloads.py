"""What is sent: against the `safetensors` package, the server's own reader, and by counting."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from server.bench.embeds_forms import MultipartEmbeds, StoredEmbeds
from server.bench.image_workload import RandomImages
from server.bench.interleaved import Interleaved
from server.bench.workloads import (
    CHAT,
    COMPLETIONS,
    Common,
    EmbedsDtype,
    Mixed,
    Prepared,
    RandomEmbeds,
    RandomIds,
    RandomText,
    Workload,
)
from server.file_tensor import RowLimits
from server.image_file import ImageLimits, decode_image, read_data_url
from server.multipart import read_fields
from server.safetensors_file import read_safetensors

COMMON = Common("m", output_len=9)


def body(request: Prepared) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(b"".join(request.body))
    return decoded


def ids_of(workload: Workload, index: int) -> list[int]:
    ids: list[int] = body(workload.prepare(index))["prompt"]
    return ids


def test_ids() -> None:
    workload = RandomIds(COMMON, 400, vocab_size=50)
    request = workload.prepare(0)
    assert (request.kind, request.path, request.output_len) == ("ids", COMPLETIONS, 9)
    sent = body(request)
    ids = sent.pop("prompt")
    assert len(ids) == 400 and set(ids) == set(range(3, 50))
    assert sent == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_extra_members_win() -> None:
    sent = body(RandomIds(Common("m", extra={"temperature": 1, "seed": 4}), 3).prepare(0))
    assert (sent["temperature"], sent["seed"]) == (1, 4)


@pytest.mark.parametrize(
    "workload",
    [
        RandomIds(COMMON, 20),
        RandomIds(COMMON, 20, prefix_len=10, num_prefixes=2),
        RandomEmbeds(COMMON, 8, 12),
        Interleaved(COMMON, 8, 12, ids_before=2, ids_after=3),
        RandomText(COMMON, 20),
        Mixed((RandomIds(COMMON, 20), RandomEmbeds(COMMON, 8, 12)), (0.5, 0.5)),
    ],
)
def test_a_request_follows_from_seed_and_index(workload: Workload) -> None:
    """So any process may make it: also one to which the workload was sent."""
    first = [workload.prepare(index).body for index in range(20)]
    assert len(set(first)) == 20
    sent_over = pickle.loads(pickle.dumps(workload))  # noqa: S301 - our own
    assert [sent_over.prepare(index).body for index in reversed(range(20))] == first[::-1]
    others = {workload.others(1).prepare(index).body for index in range(20)}
    assert not others & set(first)


def test_shared_prefixes() -> None:
    workload = RandomIds(COMMON, 30, prefix_len=10, num_prefixes=2)
    prompts = [ids_of(workload, index) for index in range(6)]
    assert all(len(prompt) == 30 for prompt in prompts)
    assert {tuple(prompt[:10]) for prompt in prompts[::2]} == {tuple(prompts[0][:10])}
    assert {tuple(prompt[:10]) for prompt in prompts[1::2]} == {tuple(prompts[1][:10])}
    assert prompts[0][:10] != prompts[1][:10]
    assert len({tuple(prompt[10:]) for prompt in prompts}) == 6
    assert ids_of(workload.others(1), 0)[:10] != prompts[0][:10]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 50])
@pytest.mark.parametrize("hidden", [1, 7, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_embeds_are_a_safetensors_file(rows: int, hidden: int, dtype: EmbedsDtype) -> None:
    sent = body(RandomEmbeds(COMMON, rows, hidden, dtype).prepare(5))
    assert sent["max_tokens"] == 9 and "prompt" not in sent
    file = base64.b64decode(sent["prompt_embeds"], validate=True)
    (tensor,) = safetensors.torch.load(file).values()
    assert tensor.shape == (rows, hidden) and tensor.dtype == getattr(torch, dtype)
    assert tensor.isfinite().all()
    theirs = read_safetensors(memoryview(file), RowLimits(hidden, 64))
    assert (theirs.num_rows, theirs.dtype) == (rows, dtype)


def test_interleaved_parts() -> None:
    workload = Interleaved(COMMON, 5, 12, "float32", ids_before=2, ids_after=3, vocab_size=100)
    sent = body(workload.prepare(0))
    before, embeds, after = sent["prompt"]
    assert [len(part["token_ids"]) for part in (before, after)] == [2, 3]
    assert all(3 <= each < 100 for part in (before, after) for each in part["token_ids"])
    (tensor,) = safetensors.torch.load(base64.b64decode(embeds["data"], validate=True)).values()
    assert tensor.shape == (5, 12)
    assert sent["max_tokens"] == 9
    first = {tuple(body(workload.prepare(index))["prompt"][0]["token_ids"]) for index in range(4)}
    assert len(first) == 4, "else a prefix cache would know them"


def test_embeds_are_normally_distributed() -> None:
    workload = RandomEmbeds(COMMON, 100, 256, "float32", std=0.5)
    file = base64.b64decode(body(workload.prepare(0))["prompt_embeds"])
    (values,) = safetensors.numpy.load(file).values()
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert values.std() == pytest.approx(0.5, rel=0.02)


def test_no_two_prompts_of_embeds_begin_alike() -> None:
    """Else a prefix cache would know them."""
    workload = RandomEmbeds(COMMON, 40, 16, "float32")
    firsts = []
    for index in range(8):
        (rows,) = safetensors.numpy.load(base64.b64decode(body(workload.prepare(index))["prompt_embeds"])).values()
        firsts.append(rows[0])
    assert len(np.unique(np.stack(firsts), axis=0)) == 8


def test_the_shared_part_is_not_copied() -> None:
    workload = RandomEmbeds(COMMON, 40, 16)
    assert workload.prepare(0).body[2] is workload.prepare(1).body[2]


def test_the_other_forms_have_the_same_rows() -> None:
    """As `httpx` would be read by the server's own parser; and of the stored one what is stored and what is not."""
    base = RandomEmbeds(COMMON, 40, 16, "float32")
    whole = base64.b64decode(body(base.prepare(3))["prompt_embeds"])
    request = MultipartEmbeds(COMMON, 40, 16, "float32").prepare(3)

    async def stream() -> AsyncIterator[bytes]:
        yield b"".join(request.body)

    fields = asyncio.run(read_fields(stream(), request.content_type))
    rows, text = fields["rows"], fields["request"]
    assert isinstance(rows, memoryview) and isinstance(text, memoryview)
    assert bytes(rows) == whole
    assert json.loads(bytes(text))["prompt"] == [{"type": "prompt_embeds", "part": "rows"}]
    stored = replace(StoredEmbeds(COMMON, 40, 16, "float32"), id="emb_1")
    own, rest = body(stored.prepare(3))["prompt"]
    assert rest == {"type": "prompt_embeds", "id": "emb_1"}
    files = [base64.b64decode(own["data"]), stored.to_store()]
    pieces = [safetensors.numpy.load(file)["rows"] for file in files]
    assert np.array_equal(np.concatenate(pieces), safetensors.numpy.load(whole)["rows"])
    assert {type(replace(stored, seed=1).others(5)), type(pickle.loads(pickle.dumps(stored)))} == {StoredEmbeds}  # noqa: S301


def test_text() -> None:
    request = RandomText(COMMON, 25).prepare(0)
    assert (request.kind, request.path) == ("text", COMPLETIONS)
    assert len(body(request)["prompt"].split()) == 25
    chat = RandomText(COMMON, 25, chat=True).prepare(0)
    assert (chat.kind, chat.path) == ("messages", CHAT)
    assert body(chat)["messages"] == [{"role": "user", "content": body(request)["prompt"]}]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_mix_has_its_shares(share: float) -> None:
    workload = Mixed((RandomEmbeds(COMMON, 3, 4), RandomIds(COMMON, 3)), (share, 1 - share))
    kinds = [workload.prepare(index).kind for index in range(1000)]
    assert kinds.count("embeds") == pytest.approx(1000 * share, abs=50 if 0 < share < 1 else 0)


def test_images() -> None:
    """Read by the server's own reader: all of their size, no two alike."""
    workload = RandomImages(COMMON, RandomText(COMMON, 7), count=2, side=50)
    request = workload.prepare(3)
    assert (request.kind, request.path, request.output_len) == ("images", CHAT, 9)
    assert body(request) == body(workload.prepare(3))
    seen = set()
    for each in (workload.prepare(3), workload.prepare(4), workload.others(1).prepare(3)):
        *images, text = body(each)["messages"][0]["content"]
        assert text["type"] == "text" and len(text["text"].split()) == 7
        assert len(images) == 2
        for image in images:
            file = read_data_url(image["image_url"]["url"], ImageLimits())
            decoded = decode_image(file, ImageLimits())
            assert decoded.size == (50, 50)
            colours = decoded.getcolors()
            assert colours is not None and len(colours) == 2 and min(count for count, _ in colours) > 1000
            seen.add(decoded.tobytes())
    assert len(seen) == 6
