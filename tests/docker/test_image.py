"""The CPU image, run as strictly as anybody would: read-only, as a user that it does not know, without capabilities."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from safetensors import safe_open
from transformers import AutoTokenizer

from tests.docker.conftest import note
from tests.docker.engine import ROOT, Container, Engine
from tests.integration.real_server import as_safetensors
from tests.server.harness import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]

STRICT = (
    *("--read-only", "--tmpfs=/tmp", "--user", "54321:0", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--pids-limit", "256"),
)
TLS_FLAGS, TLS_FILES = ("certfile", "keyfile", "ca-certs"), ("tls.crt", "tls.key", "ca.crt")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def container(engine: Engine, image: str) -> Iterator[Container]:
    """On a port that is not the default, so that the health check has to look for it."""
    started = time.monotonic()
    with Container(engine, image, STRICT, ["--port", "9000"]) as container:
        container.wait_ready()
        note(f"from `run` to ready: {time.monotonic() - started:.1f} s")
        yield container


def test_what_the_image_says_of_itself(engine: Engine, image: str) -> None:
    found = engine.image(image)
    config = found["Config"]
    assert config["Entrypoint"] == ["intarsia", "serve", "--host", "0.0.0.0"], "in exec form: signals reach the server"
    assert config["User"] == "10001:0"
    assert config["StopSignal"] == "SIGTERM"
    assert list(config["Volumes"]) == ["/cache"]
    assert "8000/tcp" in config["ExposedPorts"]
    check = config.get("Healthcheck") or found["Healthcheck"]  # podman's place for it
    assert check["Test"] == ["CMD", "intarsia", "healthcheck"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "Intarsia"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.revision"] == "test"


def test_it_has_this_checkout_inside(engine: Engine, image: str) -> None:
    """And not what some cache has kept of an older one."""
    script = "cd $1 && find server runner -type f -not -name '*.pyc' -exec sha256sum {} +"
    packages = "/opt/intarsia/lib/python3.11/site-packages"
    inside = engine.output(image, "sh", "-c", script, "sh", packages).splitlines()
    found = {name: digest for digest, name in (line.split(maxsplit=1) for line in inside)}
    assert found == _digests("server") | _digests("runner")


def _digests(package: str) -> dict[str, str]:
    """Of the checkout's files, by path."""
    files = [path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_its_user_is_known_and_is_not_root(engine: Engine, image: str) -> None:
    assert engine.output(image, "id").split() == ["uid=10001(intarsia)", "gid=0(root)", "groups=0(root)"]


def test_there_is_no_compiler_and_nothing_twice(engine: Engine, image: str) -> None:
    programs = "gcc cc g++ clang tcc ld as make rustc cargo go"
    found = engine.output(image, "sh", "-c", f"for each in {programs}; do command -v $each; done; true")
    assert found == ""
    weights = engine.output(image, "sh", "-c", "find / -xdev -name '*.gguf' 2>/dev/null; true")
    assert weights == "", "they are there, converted"


def test_only_the_cache_can_be_written(engine: Engine, image: str) -> None:
    script = "for each in /cache /opt/intarsia /opt/models /models /etc; do test -w $each && echo $each; done; true"
    found = engine.call("run", "--rm", "--user", "54321:0", "--entrypoint", "sh", image, "-c", script).stdout
    assert found.split() == ["/cache"]


def test_it_answers_text_ids_and_embeddings(container: Container, default_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    with safe_open(default_model / "model.safetensors", "pt") as file:
        rows = file.get_tensor("model.embed_tokens.weight")[ids]
    with container.client() as client:
        chat = client.post("/v1/chat/completions", json={"messages": QUESTION, **GREEDY}).json()
        completion = client.post("/v1/completions", json={"prompt": ids, **GREEDY}).json()
        embeds = client.post("/v1/completions", json={"prompt_embeds": as_safetensors(rows), **GREEDY}).json()
    assert "Paris" in chat["choices"][0]["message"]["content"]
    assert "Paris" in completion["choices"][0]["text"]
    assert embeds["choices"][0]["text"] == completion["choices"][0]["text"]


def test_the_playground_is_inside(container: Container) -> None:
    with container.client() as client:
        page = client.get("/")
    assert page.status_code == 200
    assert "<html" in page.text


def test_the_health_check_follows_the_server(container: Container) -> None:
    container.wait_health(True)
    runner = "pid=$(cat /proc/1/task/1/children) && kill -s $0 ${pid%% *}"
    container.execute("sh", "-c", runner, "STOP")
    try:
        eventually(lambda: httpx.get(f"{container.base}/readyz").status_code == 503, 30)
        container.wait_health(False)
    finally:
        container.execute("sh", "-c", runner, "CONT")
    eventually(lambda: httpx.get(f"{container.base}/readyz").status_code == 200, 30)
    container.wait_health(True)


def test_the_health_check_where_clients_need_a_certificate(engine: Engine, image: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    (tmp_path / "tls.crt").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    (tmp_path / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o755)
    flags = [f"--ssl-{flag}=/tls/{file}" for flag, file in zip(TLS_FLAGS, TLS_FILES, strict=True)]
    mount = ("--volume", f"{tmp_path}:/tls:ro")
    # The port that is published is the probes'.
    with Container(engine, image, (*STRICT, *mount), ["--port=9443", "--probe-port=9000", *flags]) as container:
        container.wait_ready()
        container.wait_health(True)
        refused = container.execute("intarsia", "healthcheck", "--url", "https://127.0.0.1:9443", check=False)
        assert refused.returncode == 1
        assert "https://127.0.0.1:9443 does not answer" in refused.stdout


def test_it_writes_nothing_that_stays(container: Container, engine: Engine) -> None:
    """After all that the tests above asked of it: only caches, and sockets in /tmp."""
    assert container.execute("touch", "/opt/models/x", check=False).returncode != 0
    found = container.execute("sh", "-c", "find /tmp /cache -type f -not -name lock -not -path '/cache/numba/*'").stdout
    assert found == ""
    changed = engine.call("diff", container.name).stdout.split("\n")
    assert [line for line in changed if line[:1] == "A" and not line[2:].startswith(("/run", "/etc", "/dev"))] == []


def test_it_drains(engine: Engine, image: str) -> None:
    """SIGTERM in the middle of a stream: that goes on to its end, nobody new is let in, and the exit status is 0."""
    body = {"prompt": "Once upon a time", "stream": True, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    with Container(engine, image, STRICT, ["--port", "9000", "--shutdown-timeout", "120"]) as container:
        container.wait_ready()
        with container.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            events = [next(lines) for _ in range(5)]
            stopping = threading.Thread(target=container.stop, args=(150,))
            stopped = time.monotonic()
            stopping.start()
            eventually(lambda: _refusal(container) == "draining", 30)
            refused = httpx.post(f"{container.base}/v1/completions", json={"prompt": "Hi"}, timeout=30)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            events += list(lines)
        stopping.join()
        seconds = time.monotonic() - stopped
        assert container.state()["ExitCode"] == 0
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1]]
    assert sum(1 for choices in texts if choices) >= 75, "a token an event, but for halves of characters"
    assert [choices[0]["finish_reason"] for choices in texts if choices][-1] == "length"
    note(f"from `stop` to the end of a container with a stream of 80 tokens: {seconds:.1f} s")


def _refusal(container: Container) -> str:
    with contextlib.suppress(httpx.TransportError):
        return str(httpx.get(f"{container.base}/readyz", timeout=10).json()["status"])
    return ""


def test_an_idle_container_stops_at_once(engine: Engine, image: str) -> None:
    with Container(engine, image, STRICT, ["--port", "9000"]) as container:
        container.wait_ready()
        started = time.monotonic()
        container.stop(60)
        note(f"from `stop` to the end of an idle container: {time.monotonic() - started:.1f} s")
        assert container.state()["ExitCode"] == 0


def test_a_model_that_is_not_there_is_said(engine: Engine, image: str) -> None:
    flags = (*STRICT, "--env", "HF_HUB_OFFLINE=1")
    with Container(engine, image, flags, ["/models/none", "--port", "9000"]) as container:
        eventually(lambda: not container.state()["Running"], 120)
        assert container.state()["ExitCode"] == 3
        assert "/models/none" in container.logs()
