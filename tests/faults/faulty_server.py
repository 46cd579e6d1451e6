"""The server that the faults happen to: real uvicorn, real runner, a tiny model, few blocks and few slots, a clock that
jumps, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests import models
from tests.integration.real_server import RealServer
from tests.models import hf_generate
from tests.server.harness import eventually

SLOTS = 8
QUEUE = 48
BLOCKS = 48
"""Of 16 rows: the longest prompt takes 32, eight short ones all."""
_BLOCK_BYTES = 8192
PROMPT = list(range(40, 60))
TOKENS = 12
CHAT_TEMPLATE = "{% if tools %}<turn>tools\n{{ tools | tojson }}<eos>\n{% endif %}" + models.CHAT_TEMPLATE
RUNNER_COMMAND = (sys.executable, "-m", "tests.faults.launch", "runner")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    anonymous: int
    """Bytes of memory that are not a file's."""
    files: int
    threads: int
    objects: int = 0
    """Tracked by Python's collector."""


class FaultyServer(RealServer):
    """`options` are fields of ServerConfig."""

    def __init__(self, folder: Path, model: Path, **options: Any) -> None:
        few = {"max_num_seqs": SLOTS, "max_queue": QUEUE, "kv_cache_memory_bytes": BLOCKS * _BLOCK_BYTES}
        checks = {"debug_checks": True, "async_scheduling": True, "runner_command": RUNNER_COMMAND}
        style = {"chat_template": CHAT_TEMPLATE, "tool_call_parser": "hermes"}
        super().__init__(folder, model, **{"dtype": "float32", **few, **checks, **style, **options})
        self.launcher = ["tests.faults.launch", "server"]
        self.environment = {"REPORTS": str(folder)}
        self._folder = folder
        self._model = model

    # --- what can be seen -----------------------------------------------------------------------------------------

    def processes(self) -> dict[str, psutil.Process]:
        """By what they are: "server", "runner", "worker1" and so on. The grammar processes come and go."""
        main = psutil.Process(self.process.pid)
        found = {"server": main}
        workers = 0
        for child in main.children():
            with contextlib.suppress(psutil.Error):
                command = child.cmdline()
                if "server.worker" in command:
                    workers += 1
                    found[f"worker{workers}"] = child
                elif "runner" in command:
                    found["runner"] = child
        return found

    @property
    def runner_pid(self) -> int:
        return int(self.processes()["runner"].pid)

    def footprints(self, *, objects: bool = True) -> dict[str, Footprint]:
        """`objects`: count these too, in the processes that `launch` has started."""
        counted = ("server", "runner") if objects else ()
        return {name: self._footprint(each, name in counted) for name, each in self.processes().items()}

    def _footprint(self, process: psutil.Process, objects: bool) -> Footprint:
        count = 0
        if objects:
            path = self._folder / f"objects-{process.pid}"
            path.unlink(missing_ok=True)
            process.send_signal(signal.SIGUSR1)
            count = int(eventually(lambda: path.read_text() if path.exists() else ""))
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        return Footprint(kib << 10, process.num_fds(), process.num_threads(), count)

    def levels(self) -> dict[str, float]:
        """Everything that has to be 0 when nobody is there, by name."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "row_bytes")
            found = {name: _value(lines, name) for name in names}
            return found | {"server_load": float(client.get("/load").json()["server_load"])}

    def errors_of_ours(self) -> list[str]:
        """Lines of the log that no client may cause."""
        signs = ("Traceback", "unexpected ", "makes no sense", "the engine died", "the engine failed")
        return [line for line in self.stderr.splitlines() if any(sign in line for sign in signs)]

    # --- what has to hold -----------------------------------------------------------------------------------------

    def assert_settled(self, seconds: float = 30) -> None:
        """No slot, block, row or request is in use, and nothing went wrong inside."""
        deadline = time.monotonic() + seconds
        while any((levels := self.levels()).values()):
            assert time.monotonic() < deadline, levels
            time.sleep(0.1)
        assert self.errors_of_ours() == []
        assert self.process.poll() is None

    def assert_well(self) -> None:
        """It is settled, ready, and answers as Hugging Face does."""
        self.assert_settled()
        eventually(lambda: self.status("/readyz") == self.status("/livez") == 200)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{self.base}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == hf_generate(self._model, PROMPT, TOKENS)


def _value(lines: list[str], name: str) -> float:
    """The sum over its labels."""
    values = [line.rpartition(" ")[2] for line in lines if line.startswith(f"intarsia:{name}{{")]
    assert values, name
    return sum(map(float, values))


def request_bytes(path: str, body: Any, *, method: str = "POST") -> bytes:
    """The request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
