"""A server with the real runner behind it, in processes of their own."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tests.server.harness import ServerProcess
from tests.server.scripted_runner import Script


class RealServer(ServerProcess):
    """`options` are fields of ServerConfig."""

    def __init__(self, folder: Path, model: Path | None, **options: Any) -> None:
        super().__init__(Script(model=""), folder, **options)
        del self._config["runner_command"]
        self._config |= {"served_model_name": ["m"], "device": "cpu"}
        if model is not None:
            self._config |= {"model": str(model), "kv_cache_memory_bytes": 64 << 20}
        self._config |= options

    @property
    def runner_pid(self) -> int:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def gauge(self, name: str) -> float:
        return self.gauges(name)[0]

    def gauges(self, *names: str) -> list[float]:
        """Of one moment."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        found = []
        for name in names:
            (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"intarsia:{name}{{")]
            found.append(float(value))
        return found

    def is_idle(self) -> bool:
        """No slot and no block is in use."""
        return self.gauges("num_requests_running", "kv_cache_usage_perc") == [0, 0]


def as_safetensors(rows: Tensor) -> str:
    return base64.b64encode(safetensors.torch.save({"rows": rows.contiguous()})).decode()


def as_torch_file(rows: Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def as_npy(rows: Tensor) -> str:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, rows.numpy())
    return base64.b64encode(buffer.getvalue()).decode()
