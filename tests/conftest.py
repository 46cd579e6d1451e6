"""What every test may ask for.

`tiny_model("llama")` is the folder of a tiny seeded fp32 model with a tokenizer (see `models.py`), built once a
session. `default_model` is the folder of the embedded default model, converted once a session (15 s). `--long` runs
the whole parity matrix and full-length fuzzing instead of a seeded subset; a test that differs by it takes `long_run`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before transformers is imported: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny models gain nothing from a second thread, and OpenMP's threads spin at their barriers: where several processes
# share two cores, a run of half a second takes a minute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Whom httpx trusts it reads anew for each client, for 20 ms, a hundred authorities that no test meets: here are none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Kernels of the CPU, which take some seconds to compile, are kept from run to run.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "numba"))

import torch
import transformers
from hypothesis import HealthCheck, settings

from tests.models import Family, build_tiny_model
from tests.vision_models import VisionFamily, build_vision_model

transformers.utils.logging.disable_progress_bar()

# A run of `make test` is the same every time; the long one looks for something new.
settings.register_profile("short", max_examples=50, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "long", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the whole parity matrix and full-length fuzzing")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu alone where there is no GPU: its modules import Triton."""
    if collection_path == Path(__file__).parent / "gpu" and not torch.cuda.is_available():
        return True
    return None


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU, so tests/gpu is left out"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {device}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="only with --long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether to run everything rather than a seeded subset."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole session, shared by the workers of a parallel run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def cache_home(session_folder: Path) -> Path:
    """`XDG_CACHE_HOME` of the tests and of the servers that they start. Never the user's own."""
    folder = session_folder / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """`tiny_model(family)` is the folder of that family's model. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("tiny")

    def get(family: Family) -> Path:
        path = folder / family
        return path if path.exists() else build_tiny_model(family, path)

    return get


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[VisionFamily], Path]:
    """The same for models that see (`vision_models.py`)."""
    folder = tmp_path_factory.mktemp("tiny-vision")

    def get(family: VisionFamily) -> Path:
        path = folder / family
        return path if path.exists() else build_vision_model(family, path)

    return get


@pytest.fixture(scope="session")
def default_model(cache_home: Path) -> Path:
    """The folder of the embedded default model (SmolLM2-135M-Instruct, bf16)."""
    from runner.default_model import default_model_path

    # Workers that need it at once would each convert it.
    with open(cache_home / "default-model.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return default_model_path()
