"""`make audit`: looks the pinned dependencies up in the advisory databases, with pip-audit.

    python -m tests.audit PIP_AUDIT [FILE]

A machine may reach a mirror of PyPI and no database; pip-audit then skips every package and reports success, which
nobody should take for an audit. So there are four outcomes, each with its exit status: 0 nothing known, 1 known
vulnerabilities, 2 the databases could not be reached, 3 some packages are in none of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVICES = ("pypi", "osv")
"""The second is asked where the first does not answer."""
SECONDS = 300
EXIT_CLEAN, EXIT_VULNERABLE, EXIT_NOT_AUDITED, EXIT_PARTLY = range(4)


@dataclass(frozen=True)
class Findings:
    audited: int
    skipped: tuple[str, ...]
    vulnerable: tuple[str, ...]
    """One line a vulnerability."""


def main(tool: str, pins: Path) -> int:
    best: Findings | None = None
    for service in SERVICES:
        found = audit(tool, pins, service)
        if found is not None and (best is None or found.audited > best.audited):
            best = found
        if best is not None and not best.skipped:
            break
    if best is None or not best.audited:
        print("NOT AUDITED: no advisory database could be reached from here. This says nothing about the dependencies.")
        return EXIT_NOT_AUDITED
    return report(best)


def audit(tool: str, pins: Path, service: str) -> Findings | None:
    """None where the service does not answer."""
    command = [tool, "--requirement", str(pins), "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--vulnerability-service", service, "--format", "json"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    try:
        return read(json.loads(done.stdout))
    except (ValueError, KeyError):
        return None


def read(document: dict[str, Any]) -> Findings:
    """What pip-audit says, in JSON."""
    dependencies = document["dependencies"]
    skipped = [each["name"] for each in dependencies if "skip_reason" in each]
    vulnerable = [
        f"{each['name']} {each['version']}: {', '.join([found['id'], *found.get('aliases', [])])};"
        f" fixed in {', '.join(found.get('fix_versions', [])) or 'no release yet'}"
        for each in dependencies
        for found in each.get("vulns", [])
    ]
    return Findings(len(dependencies) - len(skipped), tuple(skipped), tuple(vulnerable))


def report(found: Findings) -> int:
    for line in found.vulnerable:
        print(f"VULNERABLE: {line}")
    if found.skipped:
        print(f"not audited: {', '.join(found.skipped)}")
    print(f"{found.audited} packages audited, {len(found.vulnerable)} known vulnerabilities")
    if found.vulnerable:
        return EXIT_VULNERABLE
    return EXIT_PARTLY if found.skipped else EXIT_CLEAN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "constraints.txt")))
