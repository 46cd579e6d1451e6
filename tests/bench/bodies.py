"""Embeddings in the forms that a client can choose, made by hand, and how they are sent. Used by `wire`, `receiving`
and `stalls`."""

from __future__ import annotations

import base64
import http.client
import json
import time
from typing import Any

import numpy as np

UPLOAD, COMPLETIONS = "/v1/prompt_embeds", "/v1/completions"
BOUNDARY = "5f3c1a9be0d24768b1c2d3e4f5061728"
"""As long as clients' own."""
JSON, RAW = "application/json", "application/octet-stream"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
SALT = "x" * 12
"""Stands for the salt in bodies that are made beforehand."""


def completion(prompt: Any) -> bytes:
    # The salt comes first: it is looked for in up to a hundred megabytes.
    body = {"cache_salt": SALT, "max_tokens": 1, "stream": True, "temperature": 0, "prompt": prompt}
    return json.dumps(body).encode()


def part(**source: str) -> dict[str, str]:
    return {"type": "prompt_embeds", **source}


def tensor_file(rows: int, hidden: int) -> bytes:
    """bfloat16 rows as safetensors, written by hand: numpy has no such type."""
    values = np.random.default_rng(rows).standard_normal((rows, hidden), np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = json.dumps({"rows": {"dtype": "BF16", "shape": [rows, hidden], "data_offsets": [0, len(bits)]}}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bits


def multipart(fields: dict[str, bytes]) -> bytes:
    head = '--{}\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    parts = [head.format(BOUNDARY, name).encode() + value + b"\r\n" for name, value in fields.items()]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def post(port: int, path: str, body: bytes, content_type: str) -> bytes:
    """The answer's body."""
    return exchange(port, path, body, content_type)[1]


def exchange(port: int, path: str, body: bytes, content_type: str) -> tuple[float, bytes]:
    """Seconds until the first line of the answer's body, on a connection that is there already; and all of it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    try:
        began = time.perf_counter()
        connection.request("POST", path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        line = response.readline()
        seconds = time.perf_counter() - began
        return seconds, line + response.read()
    finally:
        connection.close()


def dropped(port: int, body: bytes) -> float:
    """Seconds until a body that is refused at its head has been sent and the answer is there."""
    seconds, answer = exchange(port, UPLOAD, body, "text/plain")
    assert b"content type" in answer, answer
    return seconds


def requests_of(rows: int, hidden: int) -> dict[str, tuple[str, str, bytes]]:
    """The same rows in each form that is a body of its size: path, content type and body."""
    file = tensor_file(rows, hidden)
    text = base64.b64encode(file).decode()
    return {
        "base64": (COMPLETIONS, JSON, completion([part(data=text)])),
        "multipart": (COMPLETIONS, FORM, multipart({"request": completion([part(part="rows")]), "rows": file})),
        "upload": (UPLOAD, RAW, file),
    }
