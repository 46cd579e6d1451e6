"""`make soak`: everything at once, for as long as it is told, and then a count of what is left.

    python -m tests.faults.soak --minutes 10 [--api-workers 2] [--clients 12] [--seed 1]

Clients send ids, text, embeddings, mixtures, chats, tools and grammars, whole and streamed; they leave, stop reading,
send nonsense and abort. With several API workers one is killed every half minute. After a warm-up, and again at the
end, when everybody has left, it is counted what each process holds. Exit status 1 if anything is left, if anything that
no client may cause stands in the log, or if anybody got an answer that nobody may get.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import transformers

from tests.faults.faulty_server import FaultyServer, Footprint
from tests.faults.soak_clients import SoakClient
from tests.models import build_tiny_model

KILL_SECONDS = 30.0
"""Between two deaths: a worker that dies three times in a minute ends the server, as it should."""
SAMPLE_SECONDS = 15.0
SLACK_BYTES = 24 << 20
SLACK_OBJECTS = 3000
"""Caches of compiled grammars and templates fill for a while."""


class Soak:
    def __init__(self, server: FaultyServer, model: Path, arguments: argparse.Namespace) -> None:
        self._server = server
        self._model = model
        self._seed: int = arguments.seed
        self._clients: int = arguments.clients
        self._workers: int = arguments.api_workers
        self._rng = random.Random(arguments.seed)
        self._kills = 0
        self.outcomes: Counter[str] = Counter()
        self.complaints: list[str] = []

    def run(self, seconds: float) -> None:
        warm_up = min(120.0, seconds / 4)
        print(f"seed {self._seed}: {warm_up:.0f} s of warm-up, then {seconds - warm_up:.0f} s", flush=True)
        self._phase(warm_up, 0)
        before = self._count()
        self._phase(seconds - warm_up, 1)
        after = self._count()
        self._compare(before, after)
        self._end()

    def _phase(self, seconds: float, number: int) -> None:
        """Traffic for so long, until the last client has finished what it was at."""
        until, deadline = threading.Event(), time.monotonic() + seconds
        seeds = [self._seed * 10_000 + number * 1000 + client for client in range(self._clients)]
        may_be_cut = self._workers > 1
        clients = [SoakClient(self._server, self._model, seed, until, may_be_cut) for seed in seeds]
        for client in clients:
            client.start()
        killed = sampled = time.monotonic()
        while (now := time.monotonic()) < deadline and not any(client.failure for client in clients):
            time.sleep(0.5)
            if may_be_cut and now - killed > KILL_SECONDS:
                killed = now
                self._kill_a_worker()
            if now - sampled > SAMPLE_SECONDS:
                sampled = now
                self._print_sample(deadline - now)
        until.set()
        for client in clients:
            client.join(180)
            self.outcomes += client.outcomes
            if client.is_alive():
                self.complaints.append(f"{client.name} hangs")
            elif client.failure is not None:
                self.complaints.append(f"{client.name}: {type(client.failure).__name__}: {client.failure}"[:1000])

    def _kill_a_worker(self) -> None:
        workers = [process for name, process in self._server.processes().items() if name.startswith("worker")]
        if workers:
            self._rng.choice(workers).send_signal(signal.SIGKILL)
            self._kills += 1

    def _print_sample(self, left: float) -> None:
        try:
            found = self._server.footprints(objects=False)
        except (psutil.Error, OSError):
            return  # Somebody has just died.
        held = ", ".join(f"{name} {each.anonymous >> 20} MiB {each.files} files" for name, each in found.items())
        print(f"  {left:5.0f} s left: {held}", flush=True)

    def _count(self) -> dict[str, Footprint]:
        """When everybody has left."""
        try:
            self._server.assert_well()
        except AssertionError as error:
            self.complaints.append(f"does not settle: {error}"[:1000])
        return self._server.footprints()

    def _compare(self, before: dict[str, Footprint], after: dict[str, Footprint]) -> None:
        print(f"{'':10} {'memory, MiB':>20} {'files':>12} {'threads':>12} {'tracked objects':>20}")
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                self.complaints.append(f"{name} is not there any more, or is new")
                continue
            old, new = before[name], after[name]
            print(
                f"{name:10} {old.anonymous / (1 << 20):9.1f} > {new.anonymous / (1 << 20):8.1f}"
                f" {old.files:5} > {new.files:4} {old.threads:5} > {new.threads:4} {old.objects:9} > {new.objects:8}"
            )
            # A worker may have been started in between, and is then younger than the count.
            if not (name.startswith("worker") and self._kills):
                self._judge(name, old, new)

    def _judge(self, name: str, old: Footprint, new: Footprint) -> None:
        if new.anonymous - old.anonymous > SLACK_BYTES + old.anonymous // 20:
            self.complaints.append(f"{name}: memory grew by {(new.anonymous - old.anonymous) >> 20} MiB")
        if new.files - old.files > 8:
            self.complaints.append(f"{name}: {new.files - old.files} files are left open")
        if new.threads - old.threads > 8:
            self.complaints.append(f"{name}: {new.threads - old.threads} threads are left")
        if new.objects - old.objects > SLACK_OBJECTS:
            self.complaints.append(f"{name}: {new.objects - old.objects} objects are left")

    def _end(self) -> None:
        self._server.signal(signal.SIGTERM)
        status = self._server.exit_status(60)
        if status != 0:
            self.complaints.append(f"exit status {status}")
        if self._server.leftovers():
            self.complaints.append("its folder of sockets is left")

    def report(self) -> int:
        for outcome, count in sorted(self.outcomes.items()):
            print(f"{count:8} {outcome}")
        if self._kills:
            print(f"{self._kills:8} API workers killed")
        for complaint in self.complaints:
            print(f"LEFT OR WRONG: {complaint}")
        print("verdict: " + ("failed" if self.complaints else "nothing is left, nothing went wrong"))
        return 1 if self.complaints else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="mixed traffic with random faults; looks for leaks")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        model = build_tiny_model("llama", folder / "tiny")
        with FaultyServer(folder, model, silent_seconds=2.0, api_workers=arguments.api_workers) as server:
            server.wait_ready()
            soak = Soak(server, model, arguments)
            try:
                soak.run(60 * arguments.minutes)
            except Exception:
                print(server.stderr[-5000:], file=sys.stderr)
                raise
            if soak.complaints:
                print(server.stderr[-5000:], file=sys.stderr)
        return soak.report()


if __name__ == "__main__":
    sys.exit(main())
