"""Clients that go away at any moment: while they send, while they wait in the queue, while tokens come; politely, in
the middle of a line, with a reset. Whatever they asked for is freed, and nobody else notices."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.faulty_server import PROMPT, TOKENS, FaultyServer, request_bytes
from tests.faults.traffic import Traffic
from tests.models import hf_generate

CLIENTS = 24
"""At once: three times the slots, so that most of them leave a queue."""


def leave(server: FaultyServer, data: bytes, rng: random.Random) -> str:
    """Ask, and go. Returns how far it came."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        if rng.random() < 0.5:  # a reset instead of a goodbye
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if rng.random() < 0.2:
            connection.sendall(data[: rng.randrange(len(data))])
            return "sending"
        connection.sendall(data)
        moment = rng.random()
        if moment < 0.2:
            return "sent"
        if moment < 0.6:
            time.sleep(rng.expovariate(20))
            return "waiting"
        connection.settimeout(rng.uniform(0.1, 2))
        try:
            for _ in range(rng.randint(1, 6)):
                connection.recv(rng.choice([1, 100, 4096]))
        except TimeoutError:
            return "waiting"
        return "reading"


def test_disconnects_at_random_moments(faulty: FaultyServer, llama: Path, long_run: bool) -> None:
    count = 500 if long_run else 80
    traffic = Traffic(llama, 1, max_tokens=200)
    requests = [(request_bytes(*traffic.draw()), random.Random(number)) for number in range(count)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        ends = list(pool.map(lambda each: leave(faulty, *each), requests))
    assert set(ends) >= {"sending", "sent", "waiting", "reading"}
    faulty.assert_well()


def test_who_stays_does_not_notice(faulty: FaultyServer, llama: Path, long_run: bool) -> None:
    """Streams that run meanwhile say what they say alone."""
    expected = hf_generate(llama, PROMPT, TOKENS)
    stop = threading.Event()
    traffic = Traffic(llama, 2, max_tokens=100)
    requests = [(request_bytes(*traffic.draw()), random.Random(number)) for number in range(200 if long_run else 30)]

    def stay() -> int:
        count = 0
        body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        while not stop.is_set() or not count:
            answer = httpx.post(f"{faulty.base}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
            if answer.status_code != 429:
                assert answer.json()["choices"][0]["token_ids"] == expected
                count += 1
        return count

    with ThreadPoolExecutor(12) as pool:
        staying = [pool.submit(stay) for _ in range(3)]
        list(pool.map(lambda each: leave(faulty, *each), requests))
        stop.set()
        assert all(each.result() for each in staying)
    faulty.assert_well()
