"""Answers `LookUp`s: the model's own input rows of some token ids. Asked by `runner.endpoint`.

A thread of its own reads the embedding table, which nothing writes; on CUDA in a stream of its own. So neither a step
nor the engine's thread waits for a look-up, nor it for them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.hidden import PIECE_BYTES
from runner.messages import FromRunner, LookUp, Rejected, RejectReason, TokenRows
from runner.model import Model

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Look-ups; one more is rejected. Where there are several clients, one may have a quarter of them."""
_ROWS_AT_ONCE = 512
"""On the device."""


class TokenTable:
    def __init__(
        self, model: Model, max_rows: int, send: Callable[[int, FromRunner], None], num_clients: int = 1
    ) -> None:
        """`max_rows`: of one look-up. `send`: to a worker; may be called from any thread."""
        self._model, self._max_rows, self._send = model, max_rows, send
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token table")
        self._stream: torch.cuda.Stream | None = None
        if model.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._waiting: Counter[int] = Counter()
        """By client."""
        self._max_each = MAX_WAITING if num_clients == 1 else MAX_WAITING // 4
        self._lock = threading.Lock()

    def look_up(self, message: LookUp, frames: list[memoryview]) -> None:
        """Queues one; it is answered later, or rejected at once."""
        if len(frames) != 1 or frames[0].nbytes % 4:
            return self._reject(message, "invalid", "malformed frames")
        ids = np.frombuffer(frames[0], np.int32)
        if not 1 <= len(ids) <= self._max_rows:
            return self._reject(message, "invalid", f"a look-up has 1 to {self._max_rows} token ids")
        if ids.min() < 0 or ids.max() >= self._model.vocab_size:
            return self._reject(message, "invalid", f"token ids must be below {self._model.vocab_size}")
        with self._lock:
            full = self._waiting.total() >= MAX_WAITING or self._waiting[message.client] >= self._max_each
            self._waiting[message.client] += not full
        if full:
            return self._reject(message, "queue_full", "Too many look-ups are waiting.")
        self._thread.submit(self._answer, message, ids)

    def _answer(self, message: LookUp, ids: NDArray[np.int32]) -> None:
        try:
            for first in range(0, len(ids), _ROWS_AT_ONCE):
                some = ids[first : first + _ROWS_AT_ONCE]
                self._send_rows(message, self._rows(some), is_last=first + len(some) == len(ids))
        except Exception as error:  # whatever the device says; the engine, which uses it too, will notice what is grave
            log.error("looking up %d rows failed: %s", len(ids), type(error).__name__)
            self._reject(message, "queue_full", "The rows could not be looked up now.")
        finally:
            with self._lock:
                self._waiting[message.client] -= 1

    @torch.inference_mode()
    def _rows(self, ids: NDArray[np.int32]) -> Tensor:
        """[n, hidden], model dtype, host."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._model.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            return self._model.embed(torch.from_numpy(ids.copy()).to(self._model.device)).cpu()

    def _send_rows(self, message: LookUp, rows: Tensor, *, is_last: bool) -> None:
        data: NDArray[np.uint8] = rows.contiguous().view(torch.uint8).numpy()
        step = max(PIECE_BYTES // data.shape[1], 1)
        for first in range(0, len(data), step):
            piece = data[first : first + step].tobytes()
            self._send(message.worker, TokenRows(message.request, piece, is_last and first + step >= len(data)))

    def _reject(self, message: LookUp, reason: RejectReason, text: str) -> None:
        self._send(message.worker, Rejected(message.request, reason, text))
