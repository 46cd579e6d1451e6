"""Keeps torch out of the API process. Called by `worker` before anything imports transformers.

All that the server wants of transformers is a tokenizer and its chat template, and neither needs torch. But where torch
is installed transformers imports it, which takes 200 MiB and, with one or two cores, seconds that the runner wants for
loading the model. Without it AutoTokenizer works as it does on a machine that has no torch: the same rules choose the
same class of tokenizer.
"""

from __future__ import annotations

import logging
import sys


def keep_torch_out() -> None:
    """From now on `import torch` fails in this process, unless it has been imported already."""
    # None is Python's own way to say that a module is not to be had: for `import`, and for `find_spec`, which is what
    # transformers asks.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    logging.getLogger("transformers").addFilter(_is_not_about_torch)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    """transformers advises to install PyTorch, for the sake of models, which are the runner's business."""
    return "PyTorch was not found" not in record.getMessage()
