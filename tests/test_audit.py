"""What `make audit` makes of pip-audit's answers; the tool itself is a script here, as it would need the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.audit import EXIT_CLEAN, EXIT_NOT_AUDITED, EXIT_PARTLY, EXIT_VULNERABLE, main

CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
BAD = {
    "name": "jinja2",
    "version": "3.1.4",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2024-56201"], "fix_versions": ["3.1.5"], "description": ""}],
}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ([CLEAN], EXIT_CLEAN, "1 packages audited, 0 known"),
        ([CLEAN, BAD], EXIT_VULNERABLE, "VULNERABLE: jinja2 3.1.4: PYSEC-1, CVE-2024-56201; fixed in 3.1.5"),
        ([CLEAN, SKIPPED], EXIT_PARTLY, "not audited: torch"),
        ([SKIPPED, SKIPPED], EXIT_NOT_AUDITED, "NOT AUDITED"),
        (None, EXIT_NOT_AUDITED, "NOT AUDITED"),
    ],
    ids=["clean", "vulnerable", "partly", "everything skipped", "no network"],
)
def test_outcomes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: list[dict[str, Any]] | None, status: int, words: str
) -> None:
    tool = tmp_path / "pip-audit"
    said = json.dumps({"dependencies": answer, "fixes": []}) if answer is not None else "Traceback"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit 1\n")
    tool.chmod(0o755)
    assert main(str(tool), tmp_path / "constraints.txt") == status
    assert words in capsys.readouterr().out
