"""What the server's child processes find in their environment."""

from __future__ import annotations

import pytest

from server.child_environment import environment


@pytest.mark.parametrize(
    ("ours", "spin_count"),
    [
        ({}, "5000"),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_openmp_spins_briefly_unless_the_operator_says_otherwise(
    ours: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    assert environment().get("GOMP_SPINCOUNT") == spin_count
