"""Prompts of random embeddings in the other forms that this server takes: as a multipart body, and with all but their
first rows stored beforehand. Other servers know neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import pybase64

from server.bench.http_connection import CallFailed, HttpConnection, Target
from server.bench.workloads import COMPLETIONS, Mixed, Prepared, RandomEmbeds, Workload, encode

STORE = "/v1/prompt_embeds"
_BOUNDARY = "intarsia-bench"
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"
_FIELD = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{{}}"\r\n\r\n'
_END = f"\r\n--{_BOUNDARY}--\r\n".encode()
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class MultipartEmbeds(RandomEmbeds):
    """The same rows as RandomEmbeds makes, as they are."""

    def prepare(self, index: int) -> Prepared:
        before, header, shared = self._parts
        own = self._rows((self.seed, 3, index), min(self.OWN_ROWS, self.input_len))
        return Prepared("multipart", COMPLETIONS, (before, header + own, shared, _END), self.common.output_len, _FORM)

    @cached_property
    def _parts(self) -> tuple[bytes, bytes, bytes]:
        """The form before the file, the file's header, its shared rows."""
        prompt = [{"type": "prompt_embeds", "part": "rows"}]
        body = encode(self.common.body(self.common.output_len, prompt=prompt))
        before = _FIELD.format("request").encode() + body + b"\r\n" + _FIELD.format("rows").encode()
        return before, self._header(), self._rows((self.seed, 4), max(0, self.input_len - self.OWN_ROWS))


@dataclass(frozen=True)
class StoredEmbeds(RandomEmbeds):
    """Three rows of a prompt's own, then the id of the rest, which all of them have in common. Not a repetition to a
    prefix cache: the own rows come first. `uploaded` puts `id` in."""

    id: str = field(default="", kw_only=True)

    def prepare(self, index: int) -> Prepared:
        own = replace(self, input_len=self.OWN_ROWS).file((self.seed, 3, index))
        parts = [
            {"type": "prompt_embeds", "data": pybase64.b64encode(own).decode()},
            {"type": "prompt_embeds", "id": self.id},
        ]
        body = encode(self.common.body(self.common.output_len, prompt=parts))
        return Prepared("stored", COMPLETIONS, (body,), self.common.output_len)

    def file(self, key: tuple[int, ...]) -> bytes:
        """`input_len` rows as a safetensors file."""
        return self._header() + self._rows(key, self.input_len)

    def to_store(self) -> bytes:
        """The file that `id` is for."""
        return replace(self, input_len=self.input_len - self.OWN_ROWS).file((self.seed, 4))


async def uploaded(workload: Workload, target: Target) -> Workload:
    """The workload, with what it names by id uploaded to the server. Raises CallFailed."""
    if isinstance(workload, Mixed):
        return replace(workload, parts=tuple([await uploaded(part, target) for part in workload.parts]))
    if not isinstance(workload, StoredEmbeds):
        return workload
    connection, answer = HttpConnection(target), _Answer()
    try:
        await connection.call("POST", STORE, (workload.to_store(),), answer, "application/octet-stream")
    finally:
        connection.close()
    if answer.status != 200:
        raise CallFailed(f"http_{answer.status}", f"POST {STORE} was answered with {answer.status}")
    return replace(workload, id=msgspec.json.decode(answer.body, type=_Stored).id)


class _Stored(msgspec.Struct):
    id: str


class _Answer:
    """A short answer, whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def on_status(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data
        if len(self.body) > _MAX_ANSWER_BYTES:
            raise CallFailed("bad_response", f"the answer to POST {STORE} is too long")
