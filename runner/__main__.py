"""`python -m runner CONFIG_JSON`: the runner's process. Started by the server, or by hand.

It lives as long as its standard input stays open: the server holds the other end, so the runner can't outlive it. It
leaves SIGINT and SIGTERM to the server, which drains before it lets go. Exit status: 0 told to stop, 1 the engine died,
3 the model could not be loaded as configured.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from runner.config import RunnerConfig
from runner.default_model import DefaultModelError
from runner.log_format import formatter

if TYPE_CHECKING:
    from runner.endpoint import Endpoint

EXIT_ENGINE_DIED = 1
EXIT_BAD_CONFIGURATION = 3


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_stdin, name="stdin", daemon=True).start()
    config = RunnerConfig.from_json(sys.argv[1])
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(config.log_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    # torch and transformers take seconds to import; the server may already be told that we are here.
    from runner.endpoint import Endpoint

    def die(reason: str) -> None:
        endpoint.set_failed(reason)
        _exit(endpoint, EXIT_ENGINE_DIED)

    endpoint = Endpoint(config, die)
    endpoint.set_stage("importing")
    import torch

    from runner.engine import Engine
    from runner.limits import BadConfiguration
    from runner.model import UnsupportedModel

    _keep_to_lines(config)
    try:
        engine = Engine.load(config, endpoint.emit, endpoint.set_stage)
    except (UnsupportedModel, BadConfiguration, DefaultModelError, torch.OutOfMemoryError) as error:
        message = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            message = f"out of device memory while loading (lower --gpu-memory-utilization or --max-model-len): {error}"
        endpoint.set_failed(message)
        print(f"intarsia: {message}", file=sys.stderr)
        _exit(endpoint, EXIT_BAD_CONFIGURATION)
    # What is there now stays: some 450,000 objects, which the collector would walk through again while nobody gets a
    # token, for tenths of a second.
    gc.collect()
    gc.freeze()
    endpoint.set_ready(engine)
    try:
        endpoint.run_engine(engine)
    except Exception as error:
        logging.getLogger(__name__).exception("the engine died")
        endpoint.set_failed(f"the engine died: {type(error).__name__}")
        _exit(endpoint, EXIT_ENGINE_DIED)


def _keep_to_lines(config: RunnerConfig) -> None:
    """Has the libraries that load models write to the log as we do, and draw progress bars for a terminal only."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if config.log_format == "json" or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        disable_progress_bars()
    logging.captureWarnings(True)
    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()


def _exit(endpoint: Endpoint, status: int) -> NoReturn:
    endpoint.close()
    sys.stderr.flush()
    # Threads of torch and CUDA need not be waited for, and after a device fault can't be.
    threading.Event().wait(0.2)
    os._exit(status)


def _exit_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
