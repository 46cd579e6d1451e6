"""docker or podman, as far as the tests need them: build an image, run a container, ask and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.server.harness import eventually, free_port

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 3000


class Engine:
    """`command`: docker, podman, or a path to one of them."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.is_podman = "podman" in os.path.basename(command)
        self.environment = {**os.environ, "BUILDAH_FORMAT": "docker"}  # podman's own format has no HEALTHCHECK

    def call(self, *arguments: str, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Fails with what the engine said."""
        command = [self.command, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=self.environment, cwd=ROOT
        )
        assert done.returncode == 0 or not check, f"{shlex.join(command)}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    def build(self, tag: str, dockerfile: str, *arguments: str, context: Path = ROOT) -> None:
        self.call("build", "--file", dockerfile, "--tag", tag, *arguments, str(context), seconds=BUILD_SECONDS)

    def can_pull(self, image: str) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.call("pull", "--quiet", image, seconds=300, check=False).returncode == 0
        return False

    def image(self, tag: str) -> dict[str, Any]:
        """What `image inspect` says."""
        (found,) = json.loads(self.call("image", "inspect", tag).stdout)
        assert isinstance(found, dict)
        return found

    def output(self, image: str, *command: str) -> str:
        """What `command` prints in a container of the image."""
        program, *arguments = command
        return self.call("run", "--rm", "--entrypoint", program, image, *arguments).stdout


class Container:
    """`with Container(engine, image, flags of the engine, arguments of the server) as container:`"""

    def __init__(self, engine: Engine, image: str, flags: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
        self._engine = engine
        self._flags = [*flags]
        if not engine.is_podman:  # Docker checks by itself: often, here.
            self._flags += ["--health-interval=2s", "--health-retries=2", "--health-start-period=0s"]
        self._arguments = arguments
        self._image = image
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.name = f"intarsia-test-{os.getpid()}-{self.port}"

    def __enter__(self) -> Self:
        """Of the server's ports, 9000 is the one that is published."""
        publish = ("--publish", f"127.0.0.1:{self.port}:9000")
        self._engine.call("run", "--detach", "--name", self.name, *publish, *self._flags, self._image, *self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.logs())
        self._engine.call("rm", "--force", "--volumes", self.name, check=False)

    def logs(self) -> str:
        said = self._engine.call("logs", self.name, check=False)
        return said.stdout + said.stderr

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=120)

    def wait_ready(self, seconds: float = 180) -> Self:
        def ready() -> bool:
            assert self.state()["Running"], f"it has ended: {self.logs()}"
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.base}/readyz", timeout=5).status_code == 200
            return False

        eventually(ready, seconds)
        return self

    def state(self) -> dict[str, Any]:
        (found,) = json.loads(self._engine.call("inspect", self.name).stdout)
        state = found["State"]
        assert isinstance(state, dict)
        return state

    def execute(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._engine.call("exec", self.name, *command, check=check)

    def wait_health(self, healthy: bool) -> None:
        """Until the image's HEALTHCHECK finds it so."""
        eventually(lambda: self._is_healthy() is healthy, 90)

    def _is_healthy(self) -> bool | None:
        """podman checks when it is told to; docker by itself, and None until it has."""
        if self._engine.is_podman:
            return self._engine.call("healthcheck", "run", self.name, check=False).returncode == 0
        return {"healthy": True, "unhealthy": False}.get(self.state()["Health"]["Status"])

    def stop(self, grace: int) -> None:
        """As `docker stop`: SIGTERM, and SIGKILL after `grace` seconds."""
        self._engine.call("stop", "--time", str(grace), self.name, seconds=grace + 60)


class Compose:
    """`docker compose`, or podman-compose with podman."""

    def __init__(self, engine: Engine, tools: Path | None, project: str, variables: Mapping[str, str]) -> None:
        """Raises FileNotFoundError if there is none."""
        self._environment = {**engine.environment, **variables}
        self._project = project
        if engine.is_podman:
            script = tools / "podman-compose" if tools else Path("podman-compose")
            self._command = [str(script), "--podman-path", engine.command]
        else:
            self._command = [engine.command, "compose"]
        if subprocess.run([*self._command, "version"], capture_output=True, check=False).returncode:
            raise FileNotFoundError(shlex.join(self._command))

    def call(self, *arguments: str, seconds: float = 300, check: bool = True) -> str:
        command = [*self._command, "--project-name", self._project, "--file", "docker/compose.yaml", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=self._environment, cwd=ROOT
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0 or not check, f"{shlex.join(command)}: {said[-6000:]}"
        return said
