"""Thousands of short requests of every kind, and what is left of them in each process: nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import httpx

from tests.faults.faulty_server import FaultyServer, Footprint
from tests.faults.traffic import Traffic

CLIENTS = 8


def send(server: FaultyServer, traffic: Traffic, count: int) -> None:
    lock = Lock()

    def client(share: int) -> None:
        with server.client() as client:
            for _ in range(share):
                with lock:
                    path, body = traffic.draw()
                answer = client.post(path, json=body, timeout=100)
                assert answer.status_code in (200, 429), answer.text

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, [count // CLIENTS] * CLIENTS))
    server.assert_settled()


def assert_flat(before: dict[str, Footprint], after: dict[str, Footprint], count: int) -> None:
    """Less than an object and 400 bytes a request are allowed to stay: anything kept of each one is more."""
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name]
        assert new.objects - old.objects < max(300, count // 4), (name, old, new)
        assert new.anonymous - old.anonymous < (8 << 20) + 400 * count, (name, old, new)
        assert new.files - old.files <= 8, (name, old, new)
        # Pools get a thread when all of theirs are busy, which many clients may see to only now.
        assert new.threads - old.threads < min(40, count // 6), (name, old, new)


def test_nothing_is_left_of_short_requests(faulty: FaultyServer, llama: Path, long_run: bool) -> None:
    warm_up, count = (2000, 8000) if long_run else (80, 240)
    traffic = Traffic(llama, 3, max_tokens=6)
    send(faulty, traffic, warm_up)
    before = faulty.footprints()
    send(faulty, traffic, count)
    assert_flat(before, faulty.footprints(), count)
    faulty.assert_well()


def test_the_clock_jumps_and_nothing_depends_on_it(faulty: FaultyServer) -> None:
    """`launch` makes the processes' wall clocks jump by years, in all these tests. Ages and durations don't."""
    body = {"model": "m", "prompt": [5, 6], "max_tokens": 3}
    created = [httpx.post(f"{faulty.base}/v1/completions", json=body, timeout=60).json()["created"] for _ in range(8)]
    assert max(created) - min(created) > 365 * 86400  # They do jump.
    with faulty.client() as client:
        lines = client.get("/metrics").text.splitlines()
    for name in ("e2e_request_latency", "time_to_first_token", "inter_token_latency", "request_queue_time"):
        (total,) = [float(line.split()[-1]) for line in lines if line.startswith(f"intarsia:{name}_seconds_sum")]
        assert 0 <= total < 30 * 86400
    assert faulty.status("/readyz") == faulty.status("/livez") == 200
