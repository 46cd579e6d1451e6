"""POST /v1/embeddings: OpenAI's embeddings, made of the served language model's last hidden states.

Each input is an engine request that generates nothing and is sent one row: the mean over its positions (taken on the
device), or the last position's. So embeddings share the batch, the chunks and the limits of everything else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from runner.messages import HiddenRows, SamplingParams
from server.batch import Batch, EngineRequest
from server.embeddings_input import embedding_prompts
from server.embeddings_schema import EmbeddingRequest
from server.errors import EngineFailed, InvalidRequest, QueueFull, Unavailable, UnsupportedParameter
from server.inputs import Prompt
from server.openapi import json_body
from server.pooling import Pooling, embedding_of
from server.request_body import read_request
from server.request_context import current_request, release_body
from server.respond import run_handler
from server.rows_out import as_base64
from server.schemas import parse
from server.services import Services, services_of
from server.unsupported import EMBEDDING, refuse_unknown, refuse_unsupported

router = APIRouter()

_TEXT_BYTES, _NUMBER_BYTES = 10, 26
"""Of a value in an answer, with the row that it was: in base64, and as a number."""
_AT_ONCE = 32
"""Engine requests of one HTTP request: two thousand inputs must not fill the engine's queue."""


@router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingRequest, tensors=True))
async def embeddings(request: Request) -> Response:
    # The body has no name here, so that `_embed` can let go of it.
    return await run_handler(request, _embed(await read_request(request), services_of(request)))


async def _embed(body: Mapping[str, Any], services: Services) -> Response:
    refuse_unsupported(body, EMBEDDING)
    request = parse(EmbeddingRequest, body)
    if services.strict_params:
        refuse_unknown(body, EmbeddingRequest, EMBEDDING)
    model = services.model_name(request.model)
    if services.soft_rows(request.model) is not None:
        raise UnsupportedParameter("model: embeddings behind a soft prompt are not supported.", param="model")
    if (context := current_request.get()) is not None:
        context.model = model
    hidden_size, dtype = services.model.hidden_size, services.model.dtype
    dimensions = services.dimensions.check(request.dimensions, hidden_size)
    prompts = await embedding_prompts(request, services)
    del body
    pooling = request.pooling or services.default_pooling
    normalize, as_text = request.normalize is not False, request.encoding_format == "base64"
    services.answer_memory.reserve(len(prompts) * dimensions * (_TEXT_BYTES if as_text else _NUMBER_BYTES))
    salt = request.cache_salt or ""
    del request
    if not any(span.pixels for prompt in prompts for span in prompt.rows.spans):
        release_body()  # images are held until they have had their turn
    tokens, wheres = sum(map(len, prompts)), [prompt.param for prompt in prompts]
    rows = await _pool_all(prompts, pooling, salt, services)

    def encode() -> bytes:
        row_dtype = "float32" if pooling == "mean" else dtype
        data: list[dict[str, Any]] = []
        for index, (row, where) in enumerate(zip(rows, wheres, strict=True)):
            try:
                values = embedding_of(row, row_dtype, dimensions=dimensions, normalize=normalize)
            except ValueError:
                raise _overflow(where) from None
            data.append({"object": "embedding", "index": index, "embedding": _written(values, as_text=as_text)})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})

    return Response(await asyncio.to_thread(encode), media_type="application/json")


def _overflow(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: the model overflows on it, its hidden states are not finite.", param=where)


def _written(values: npt.NDArray[np.float32], *, as_text: bool) -> msgspec.Raw:
    """Encoded one by one, so that the event loop has its turn between two. (base64 is of little-endian float32.)"""
    if as_text:
        return as_base64(values.astype("<f4").tobytes())
    return msgspec.Raw(msgspec.json.encode(values.tolist()))


async def _pool_all(prompts: list[Prompt], pooling: Pooling, salt: str, services: Services) -> list[bytes]:
    """Each prompt's pooled row; prompts are let go of on the way. Raises APIError, once nothing runs any more."""
    rows = [b""] * len(prompts)
    numbers = deque(range(len(prompts)))
    working = min(_AT_ONCE, len(prompts))
    done = 0

    async def work() -> None:
        """One after the other. Where there is no room beside this request's own, it has fewer at once, in the end one:
        whether a key's limit lets 32 in or 2, its inputs get their turn."""
        nonlocal working, done
        while numbers:
            number, before = numbers.popleft(), done
            try:
                rows[number] = await _pooled(prompts[number], pooling, salt, services)
            except QueueFull:
                if working == 1 and done == before:
                    raise
                numbers.appendleft(number)
                if working > 1:
                    break
                continue
            prompts[number] = Prompt.from_token_ids((), "")
            done += 1
        working -= 1

    tasks = [asyncio.ensure_future(work()) for _ in range(working)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rows


async def _pooled(prompt: Prompt, pooling: Pooling, salt: str, services: Services) -> bytes:
    sampling = SamplingParams(0, temperature=0.0, return_hidden_states=pooling)
    batch = await Batch.open(services.engine, [EngineRequest(prompt.rows, sampling, 1, salt)])
    try:
        return await _row_of(batch)
    finally:
        batch.close()


async def _row_of(batch: Batch) -> bytes:
    found: Sequence[HiddenRows] = ()
    news = asyncio.Event()
    batch.listen(news.set)
    try:
        while True:
            while (taken := batch.take()) is not None:
                event = taken[1]
                found = event.hidden or found
                if event.end is not None and event.end.reason == "abort":
                    raise Unavailable("The request was aborted by the server.")
            if batch.has_ended:
                break
            await news.wait()
            news.clear()
    finally:
        batch.listen(None)
    if not found:
        raise EngineFailed
    return found[-1].rows
