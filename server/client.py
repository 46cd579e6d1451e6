"""A client for prompts that are made of text, token ids and embeddings. Not a part of the server, and needs nothing of
it: httpx and safetensors, numpy or torch for the rows themselves.

    from server.client import Client

    with Client("http://127.0.0.1:8000") as client:
        answer = client.complete(["What is the", rows, "?"], max_tokens=24)
        print(answer["choices"][0]["text"])

        kept = client.upload(rows)  # sent once, used often
        answer = client.complete([kept, "Describe this."], max_tokens=24)

Rows travel as multipart/form-data: as they are, without base64. Synchronous only; one client may be used by several
threads, and for `asyncio` there is `asyncio.to_thread`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import httpx

__all__ = ["Client", "ClientError", "Json", "Piece", "StoredEmbedding", "encode_rows"]

Json = dict[str, Any]

Piece = Any
"""What a prompt is put together from: a text (`str`), token ids (a list of `int`), embedding rows (a numpy array or a
torch tensor [rows, hidden], or the bytes of a tensor file), a `StoredEmbedding`, or a part as the API has it (a dict).
"""

_ROUTE = "/v1/prompt_embeds"
_DTYPES = ("float32", "float16", "bfloat16")
_PAGE = 100


class ClientError(Exception):
    """An answer of the server that says no."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.param = param
        """The field that is wrong, if the server knows it."""
        self.code = code


@dataclass(frozen=True)
class StoredEmbedding:
    """Rows that the server keeps. It may forget them before `expires_at`, to make room; a prompt that names them then
    is answered 404 (`prompt_embeds_not_found`), and they have to be uploaded again."""

    id: str
    rows: int
    hidden: int
    dtype: str
    """The model's, which the rows were cast to."""
    sha256: str
    """Hex, of the rows' bytes in that dtype."""
    created_at: int
    """Seconds since 1970, as is `expires_at`."""
    expires_at: int


def encode_rows(rows: Any) -> bytes:
    """Embedding rows as a safetensors file.

    Args:
        rows: [rows, hidden] or [1, rows, hidden] of float32, float16 or (torch only) bfloat16: a numpy array or a torch
            tensor on any device. `bytes` are taken for a tensor file already (safetensors, .npy or torch.save's).

    Raises:
        TypeError: for what is neither, and for any other dtype; nothing is cast here, lest it be unnoticed.
    """
    if isinstance(rows, bytes | bytearray | memoryview):
        return bytes(rows)
    dtype = str(getattr(rows, "dtype", "")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(
            f"rows must be an array or a tensor of {', '.join(_DTYPES)}, not {dtype or type(rows).__name__}"
        )
    if type(rows).__module__.partition(".")[0] == "torch":
        from safetensors.torch import save

        return save({"rows": rows.detach().cpu().contiguous()})
    import numpy as np
    from safetensors.numpy import save as save_array

    return save_array({"rows": np.ascontiguousarray(rows)})


class Client:
    """One server. `model`: named in every request that names no other. `http`: an httpx client to use instead of one of
    its own (its base_url, headers and timeouts then count); who made it closes it."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        http: httpx.Client | None = None,
    ) -> None:
        self._model = model
        self._owned = http is None
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = http or httpx.Client(
            base_url=base_url, headers=headers, timeout=httpx.Timeout(timeout, connect=10)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._owned:
            self._http.close()

    # --- stored embeddings ------------------------------------------------------------------------------------------

    def upload(self, rows: Any) -> StoredEmbedding:
        """Have the server keep these rows (see `encode_rows`). The same rows again get the same id, and more time.

        Raises ClientError (413: too large; 429: no room at the moment), httpx.HTTPError.
        """
        headers = {"Content-Type": "application/octet-stream"}
        return _stored(self._call("POST", _ROUTE, content=encode_rows(rows), headers=headers))

    def get(self, id: str) -> StoredEmbedding:
        """Raises ClientError (404: not there, or no longer)."""
        return _stored(self._call("GET", f"{_ROUTE}/{id}"))

    def list(self) -> Iterator[StoredEmbedding]:
        """Everything that is kept for this API key, the newest first. Asks for it page by page."""
        after: dict[str, str] = {}
        while True:
            page = self._call("GET", _ROUTE, params={"limit": _PAGE, **after})
            yield from map(_stored, page["data"])
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}

    def delete(self, stored: StoredEmbedding | str) -> None:
        """Raises ClientError (404: not there, or no longer)."""
        self._call("DELETE", f"{_ROUTE}/{stored if isinstance(stored, str) else stored.id}")

    # --- answers ----------------------------------------------------------------------------------------------------

    def complete(self, prompt: Piece | Sequence[Piece], **parameters: Any) -> Json:
        """/v1/completions, whole.

        Args:
            prompt: one piece, or a list of them, which become one prompt.
            parameters: the API's, `max_tokens` and so on.

        Raises:
            ClientError, httpx.HTTPError
        """
        return self._call("POST", "/v1/completions", **self._body({"prompt": prompt}, parameters))

    def stream(self, prompt: Piece | Sequence[Piece], **parameters: Any) -> Iterator[Json]:
        """The same in chunks, as they come. Raises ClientError, also when the answer fails half-way."""
        return self._stream("/v1/completions", self._body({"prompt": prompt}, parameters | {"stream": True}))

    def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> Json:
        """/v1/chat/completions, whole. A message's `content` may be a list of pieces. Raises as `complete` does."""
        return self._call("POST", "/v1/chat/completions", **self._body({"messages": messages}, parameters))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> Iterator[Json]:
        """The same in chunks, as they come. Raises as `stream` does."""
        return self._stream("/v1/chat/completions", self._body({"messages": messages}, parameters | {"stream": True}))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _body(self, prompt: Json, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """httpx's arguments for a body: JSON, or a form where there are rows in it."""
        form = _Form()
        body: Json = {} if self._model is None else {"model": self._model}
        body |= parameters
        if "prompt" in prompt:
            body["prompt"] = form.prompt(prompt["prompt"])
        else:
            body["messages"] = [form.message(each) for each in prompt["messages"]]
        data = json.dumps(body).encode()
        if not form.files:
            return {"content": data, "headers": {"Content-Type": "application/json"}}
        files = {name: (f"{name}.safetensors", file, "application/octet-stream") for name, file in form.files.items()}
        return {"files": {"request": (None, data, "application/json"), **files}}

    def _call(self, method: str, path: str, **options: Any) -> Json:
        response = self._http.request(method, path, **options)
        _check(response)
        body: Json = response.json()
        return body

    def _stream(self, path: str, options: dict[str, Any]) -> Iterator[Json]:
        with self._http.stream("POST", path, **options) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in _lines(response):
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]":
                    return
                chunk: Json = json.loads(line[6:])
                if "error" in chunk:
                    raise _error(response.status_code, chunk)
                yield chunk
        raise ClientError(response.status_code, "the answer ended before its end")


class _Form:
    """Turns pieces into parts, and puts their rows aside."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def prompt(self, prompt: Any) -> Any:
        if isinstance(prompt, str) or _are_ids(prompt):
            return prompt  # a plain prompt: special tokens go around it
        return [self._part(piece) for piece in (prompt if isinstance(prompt, list | tuple) else [prompt])]

    def message(self, message: Mapping[str, Any]) -> Json:
        content = message.get("content")
        if isinstance(content, list | tuple):
            return {**message, "content": [self._part(piece) for piece in content]}
        return dict(message)

    def _part(self, piece: Any) -> Json:
        if isinstance(piece, str):
            return {"type": "text", "text": piece}
        if isinstance(piece, StoredEmbedding):
            return {"type": "prompt_embeds", "id": piece.id}
        if isinstance(piece, Mapping):
            return dict(piece)
        if _are_ids(piece):
            return {"type": "token_ids", "token_ids": list(piece)}
        name = f"rows{len(self.files)}"
        self.files[name] = encode_rows(piece)
        return {"type": "prompt_embeds", "part": name}


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Of a body, as it comes. httpx's own end at more than line feeds: at a U+2028 in a text, for one."""
    pieces: list[bytes] = []
    for piece in response.iter_bytes():
        *ended, begun = piece.split(b"\n")
        for end in ended:
            yield b"".join([*pieces, end]).removesuffix(b"\r")
            pieces.clear()
        pieces.append(begun)
    yield b"".join(pieces)


def _are_ids(piece: Any) -> bool:
    return isinstance(piece, list | tuple) and bool(piece) and all(isinstance(each, int) for each in piece)


def _stored(body: Json) -> StoredEmbedding:
    return StoredEmbedding(**{field.name: body[field.name] for field in fields(StoredEmbedding)})


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        body = response.json()
    except ValueError:
        body = None
    raise _error(response.status_code, body)


def _error(status: int, body: Any) -> ClientError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ClientError(status, "the answer is not one of this API's")
    return ClientError(status, str(error.get("message")), error.get("param"), error.get("code"))
