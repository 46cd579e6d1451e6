"""What clients do during a soak: most behave, some are in a hurry, slow, confused or malicious. Used by `soak`."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.faults.body_mutator import BodyMutator
from tests.faults.faulty_server import FaultyServer, request_bytes
from tests.faults.test_bad_bodies import Verdicts, examples_of, valid_bodies
from tests.faults.test_disconnects import leave
from tests.faults.traffic import RESPONSES, Traffic

BUSY = (429, 503)


class SoakClient(threading.Thread):
    """Acts at random until `until`; then `failure` says what must not have happened, if anything.

    `may_be_cut`: connections may end without an answer, because processes that serve them are killed.
    """

    def __init__(self, server: FaultyServer, model: Path, seed: int, until: threading.Event, may_be_cut: bool) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self.outcomes: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._server = server
        self._until = until
        self._may_be_cut = may_be_cut
        self._rng = random.Random(seed)
        self._traffic = Traffic(model, seed, max_tokens=60)
        self._mutator = BodyMutator(seed)
        self._valid = valid_bodies(model, seed, examples_of(server))
        self._verdicts = Verdicts(server, model)
        self._actions: dict[Callable[[], str], int] = {
            self._whole: 30,
            self._streamed: 30,
            self._leave: 20,
            self._wrong: 20,
            self._never_read: 1,
            self._idle: 3,
            self._abort: 4,
            self._look: 4,
        }

    def run(self) -> None:
        try:
            while not self._until.is_set():
                self._act()
        except BaseException as error:
            self.failure = error

    def _act(self) -> None:
        (action,) = self._rng.choices(list(self._actions), list(self._actions.values()))
        try:
            self.outcomes[f"{action.__name__.strip('_')}: {action()}"] += 1
        except (httpx.TransportError, OSError) as error:
            if not self._may_be_cut:
                raise
            self.outcomes[f"{action.__name__.strip('_')}: cut ({type(error).__name__})"] += 1
        except AssertionError as error:
            if not (self._may_be_cut and isinstance(error.__cause__, httpx.TransportError)):
                raise
            self.outcomes["wrong: cut"] += 1

    def _whole(self) -> str:
        path, body = self._traffic.draw(stream=False)
        answer = httpx.post(self._server.base + path, json=body, timeout=120)
        assert answer.status_code == 200 or answer.status_code in BUSY, answer.text
        return str(answer.status_code)

    def _streamed(self) -> str:
        path, body = self._traffic.draw(stream=True)
        answer = httpx.post(self._server.base + path, json=body, timeout=120)
        if answer.status_code in BUSY:
            return str(answer.status_code)
        assert answer.status_code == 200, answer.text
        last = answer.text.rstrip().rpartition("\n")[2]
        ended = last == "data: [DONE]" if path != RESPONSES else '"response.failed"' not in last
        assert ended and '"error":{' not in answer.text, last
        return "complete"

    def _leave(self) -> str:
        path, body = self._traffic.draw()
        return "while " + leave(self._server, request_bytes(path, body), self._rng)

    def _wrong(self) -> str:
        path, body = self._valid()
        with self._server.client() as client:
            for _ in range(8):
                self._verdicts.send(client, path, self._mutator.mutate(body))
        return "eight answered"

    def _never_read(self) -> str:
        body = {"model": "m", "prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "logprobs": 20, "stream": True}
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(30)
            connection.connect(("127.0.0.1", self._server.port))
            connection.sendall(request_bytes("/v1/completions", {**body, "n": 4}))
            time.sleep(self._rng.uniform(0, 6))
        return "left in the end"

    def _idle(self) -> str:
        with socket.create_connection(("127.0.0.1", self._server.port), 30) as connection:
            connection.sendall(b"GET /livez HT"[: self._rng.randrange(14)])
            time.sleep(self._rng.uniform(0, 3))
        return "left"

    def _abort(self) -> str:
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._server.base}/v1/completions", json=body, timeout=120) as answer:
            if answer.status_code in BUSY:
                return str(answer.status_code)
            lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
            answer_id = json.loads(next(lines))["id"]
            status = httpx.post(f"{self._server.base}/abort", json={"id": answer_id}, timeout=60).status_code
            last = [json.loads(line) for line in lines][-1]
        return f"{status}, {'aborted' if 'error' in last else 'too late'}"

    def _look(self) -> str:
        path = self._rng.choice(["/metrics", "/livez", "/readyz", "/v1/models", "/load", "/openapi.json"])
        answer = httpx.get(self._server.base + path, timeout=60)
        assert answer.status_code == 200, answer.text
        return "200"
