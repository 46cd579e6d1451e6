"""`make compat`: runs each client, in an environment of its own, against servers of this checkout.

    python -m tests.compat .venv-compat [CLIENT…]

Below the folder lies an environment a client, made from `requirements/` (by the Makefile): the clients need many
packages, not always the same versions, and this project none of them. Exit status 1 if one of them fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from runner.default_model import default_model_path
from server.config import DEFAULT_MODEL_NAME
from tests.compat.aiperf_profile import profile
from tests.compat.guidellm_run import benchmark
from tests.compat.servers import default_server, tiny_server, two_servers

CLIENT_SECONDS = 1800
HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SCRIPTS = {
    "openai-2": "openai_python",
    "openai-3": "openai_python",
    "langchain-openai": "langchain_chat",
    "instructor": "instructor_models",
    "pydantic-ai": "pydantic_agent",
    "litellm": "litellm_calls",
    "llm": "llm_command",
}
"""Environment to the module here that is run in it, with the file of a `Setting`."""
NODE_SCRIPTS = {"openai-node": "openai_node.mjs", "ai-sdk": "ai_sdk.mjs"}
"""The same for node: both share the environment `node`."""
SCHEMATHESIS_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,negative_data_rejection"
)
CLIENTS = (*SCRIPTS, *NODE_SCRIPTS, "lm-eval", "schemathesis", "aiperf", "guidellm", "vllm")


def main(environments: Path, names: Sequence[str]) -> int:
    if unknown := set(names) - set(CLIENTS):
        print(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(CLIENTS)}")
        return 2
    failed = []
    with ExitStack() as servers:
        setting: Path | None = None
        for name in names or CLIENTS:
            print(f"--- {name}", flush=True)
            if name == "lm-eval":
                passed = lm_eval(environments / name)
            elif name == "schemathesis":
                passed = schemathesis(environments / name)
            elif name == "aiperf":
                passed = aiperf(environments / name)
            elif name == "guidellm":
                passed = guidellm(environments / name)
            elif name == "vllm":
                passed = vllm(environments / name)
            else:
                setting = setting or servers.enter_context(two_servers())
                passed = script(environments, name, setting)
            if not passed:
                failed.append(name)
    print("--- failed: " + ", ".join(failed) if failed else "--- all clients passed")
    return 1 if failed else 0


def script(environments: Path, name: str, setting: Path) -> bool:
    if name in NODE_SCRIPTS:
        node = environments / "node"
        # Node looks for modules beside the script.
        for source in (HERE / "node").glob("*.mjs"):
            shutil.copy(source, node)
        return passes(["node", str(node / NODE_SCRIPTS[name]), str(setting)])
    return passes([python(environments / name), "-m", f"tests.compat.{SCRIPTS[name]}", str(setting)])


def lm_eval(environment: Path) -> bool:
    with default_server() as base:
        return passes([python(environment), "-m", "tests.compat.lm_eval_local", base])


def schemathesis(environment: Path) -> bool:
    with tiny_server() as base:
        command = [str(environment / "bin" / "schemathesis"), "run", f"{base}/openapi.json"]
        limits = ("--max-examples", "50", "--request-timeout", "120")
        return passes([*command, "--checks", SCHEMATHESIS_CHECKS, *limits])


def aiperf(environment: Path) -> bool:
    with default_server() as base:
        try:
            return profile(environment / "bin" / "aiperf", base)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{type(error).__name__}: {error}")
            return False


def guidellm(environment: Path) -> bool:
    with default_server() as base:
        try:
            return benchmark(environment / "bin" / "guidellm", base)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{type(error).__name__}: {error}")
            return False


def vllm(environment: Path) -> bool:
    with default_server() as base:
        command = [python(environment), "-m", "tests.compat.vllm_bench", base, DEFAULT_MODEL_NAME]
        return passes([*command, str(default_model_path())])


def python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def passes(command: Sequence[str]) -> bool:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=CLIENT_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{type(error).__name__}: {error}")
        return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
