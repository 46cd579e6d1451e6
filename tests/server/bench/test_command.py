"""`intarsia bench serve` as its users call it, against a real server with a scripted runner."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from server.bench.flags import add_arguments
from server.cli import main
from tests.server.conftest import StartServer
from tests.server.harness import ROOT, ServerProcess

Lines = list[dict[str, Any]]


def bench(capsys: pytest.CaptureFixture[str], server: ServerProcess, *flags: str, status: int = 0) -> Lines:
    """What it prints with --json."""
    assert main(["bench", "serve", "--url", server.base, "--json", "--no-progress", *flags]) == status
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What it says of flags that it can't work with, before it sends anything."""
    try:
        status = main(["bench", "serve", "--url", "http://127.0.0.1:1", *flags])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    return capsys.readouterr().err


def num_generated(server: ServerProcess) -> int:
    return len(server.messages("generate"))


def test_closed_loop(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    before = num_generated(server)
    load = "--concurrency 4 --num-requests 12 --warmup 3 --procs 2 --input-len 20 --output-len 8 --vocab-size 384"
    (point,) = bench(capsys, server, *load.split())
    assert num_generated(server) - before == 15
    expected = {"sent": 12, "answered": 12, "failed": 0, "input_tokens": 240, "output_tokens": 96, "wrong_length": 0}
    assert point | expected == point
    assert (point["model"], point["errors"]) == ("scripted", {})
    # Each process has two at a time; whether those of both are seen together is up to the machine (see test_workers).
    assert 2 <= point["peak_concurrency"] <= 4
    # Internal agreement: what the rates say is what the counts say.
    # As closely as their rounding allows (seconds to 4 places, milliseconds to 3): a fast run lasts 30 ms.
    fastest, slowest = (96 / (point["seconds"] + error) for error in (-5.1e-5, 5.1e-5))
    assert slowest - 0.01 <= point["output_tokens_per_second"] <= fastest + 0.01
    parts = point["ttft_ms"]["mean"] + 7 * point["tpot_ms"]["mean"]
    assert point["e2el_ms"]["mean"] == pytest.approx(parts, rel=0, abs=0.005)


def test_embeds_and_a_mix(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--hidden 64 --concurrency 2 --num-requests 8 --procs 1 --input-len 20 --output-len 4 --vocab-size 384"
    for workload in ("embeds", "mixed", "interleaved"):
        (point,) = bench(capsys, server, "--workload", workload, *load.split())
        assert (point["answered"], point["input_tokens"], point["output_tokens"]) == (8, 160, 32)


def test_a_server_says_itself_how_its_rows_are_made(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither --hidden nor --vocab-size: what the results state is the model's, 64 and 384."""
    output = tmp_path / "all.json"
    load = ["--num-requests", "4", "--warmup", "0", "--procs", "1", "--input-len", "20", "--output-len", "2"]
    for workload, rows in (("ids", (384, None)), ("embeds", (None, 64)), ("mixed", (384, 64))):
        (point,) = bench(capsys, server, "--workload", workload, *load, "--output", str(output))
        assert (point["answered"], point["failed"]) == (4, 0)
        options = json.loads(output.read_text())["options"]
        assert (options["vocab_size"], options["hidden"]) == rows
    (point,) = bench(capsys, server, "--vocab-size", "9", *load, "--output", str(output))
    assert json.loads(output.read_text())["options"]["vocab_size"] == 9


def test_a_server_that_does_not_say_how_its_rows_are_made(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--url", f"{server.base}/nowhere", "--model", "m", "--warmup", "0", "--procs", "1", "--no-progress"]
    assert main(["bench", "serve", *flags, "--workload", "embeds"]) == 2
    assert "--workload embeds needs --hidden: the server doesn't say it" in capsys.readouterr().err
    output = tmp_path / "all.json"
    assert main(["bench", "serve", *flags, "--num-requests", "1", "--output", str(output)]) == 1
    assert json.loads(output.read_text())["options"]["vocab_size"] == 32_000


def test_embeds_in_other_forms(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--hidden 64 --concurrency 2 --num-requests 8 --procs 2 --input-len 20 --output-len 4 --vocab-size 384"
    stored = len(server.messages("stored"))
    for workload, form in (("embeds", "multipart"), ("embeds", "stored"), ("mixed", "stored")):
        (point,) = bench(capsys, server, "--workload", workload, "--embeds-as", form, *load.split())
        assert (point["answered"], point["input_tokens"], point["output_tokens"]) == (8, 160, 32), form
    # Twice for the measured requests and twice for those that warm up, each by two processes: the same two embeddings.
    assert len(server.messages("stored")) > stored
    with server.client() as client:
        assert len(client.get("/v1/prompt_embeds").json()["data"]) == 2


def test_a_server_without_a_store(start_server: StartServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server(max_stored_bytes=0).wait_ready()
    load = "--workload embeds --embeds-as stored --hidden 64 --input-len 20 --procs 1 --no-progress"
    assert main(["bench", "serve", "--url", server.base, *load.split()]) == 1
    assert "POST /v1/prompt_embeds was answered with 400" in capsys.readouterr().err


def test_text_chat_and_an_open_loop(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--workload text --chat --request-rate 100 --num-requests 10 --procs 1 --input-len 5 --output-len 4"
    (point,) = bench(capsys, server, *load.split(), "--arrivals", "constant", "--goodput", "ttft:60000", "e2el:0.001")
    assert (point["answered"], point["output_tokens"], point["load"]) == (10, 40, "rate 100/s")
    assert point["lateness_ms"]["mean"] >= 0
    assert (point["good"], point["goodput_requests_per_second"]) == (0, 0)


def test_what_the_server_refuses_is_counted_by_kind(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [[5, 6], [13, 5], [6, 7], [13, 6], [14, 5], [5] * 600, [99_999]]  # 13: queue_full, 14: rows_full
    file.write_text("\n".join(json.dumps({"prompt": prompt, "output_len": 3}) for prompt in prompts))
    load = ["--workload", "jsonl", "--prompts", str(file), "--warmup", "0", "--procs", "1"]
    (point,) = bench(capsys, server, *load)
    assert (point["sent"], point["answered"], point["failed"], point["output_tokens"]) == (7, 2, 5, 6)
    assert point["errors"] == {"http_429": 3, "http_400": 2}
    assert point["error_examples"]["http_400"].startswith("HTTP 400: ")


def test_a_replayed_trace(server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    entries = [{"timestamp": 10 * n, "input_length": 5 + n, "output_length": 2 + n} for n in range(6)]
    file.write_text("\n".join(map(json.dumps, entries)))
    load = ["--workload", "trace", "--trace", str(file), "--vocab-size", "384", "--procs", "1", "--trace-speed", "2"]
    (point,) = bench(capsys, server, *load)
    assert (point["answered"], point["input_tokens"], point["output_tokens"]) == (6, 45, 27)
    assert point["load"] == "trace × 2"


def test_results_of_a_comparison(server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same server on both sides, in a sweep: files, report, and two times two points of two rounds."""
    output, report = tmp_path / "all.json", tmp_path / "report.html"
    load = "--workload text --sweep 1,2 --num-requests 4 --rounds 2 --procs 1 --input-len 9 --output-len 3 --warmup 1"
    files = ["--output", str(output), "--html", str(report), "--label", "<b>mine</b>", "--api-key", "sesame"]
    lines = bench(capsys, server, *load.split(), "--compare", server.base + "/v1", *files)
    points, comparisons = lines[:4], lines[4:]
    assert [(point["concurrency"], point["url"]) for point in points] == [
        (1, server.base), (1, server.base + "/v1"), (2, server.base), (2, server.base + "/v1"),
    ]  # fmt: skip
    assert all(point["answered"] == 8 for point in points)
    assert [line["comparison"]["load"] for line in comparisons] == ["concurrency 1", "concurrency 2"]

    everything = json.loads(output.read_text())
    assert "sesame" not in output.read_text() and "sesame" not in report.read_text()
    assert str(tmp_path) not in report.read_text() + output.read_text()
    assert everything["options"]["sweep"] == "1,2"
    rounds = everything["points"][0]["per_round"]
    assert [len(round_["requests"]) for round_ in rounds] == [4, 4]
    request = rounds[0]["requests"][0]
    assert (request["start"], request["completion_tokens"], request["error"]) == (0.0, 3, None)
    assert len(request["gaps"]) == request["num_events"] - 1  # a token without text has no event of its own
    assert request["first"] + sum(request["gaps"]) <= request["last"] + 1e-5 <= request["end"] + 2e-5
    check_report(report.read_text())


def check_report(html: str) -> None:
    assert "<b>mine" not in html and "&lt;b&gt;mine" in html
    assert "<script" not in html and not re.search(r"(\ssrc=|href=|url\(|@import)", html)
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(plots) == 3 + 4 + 2 * 4  # over concurrency, cumulative, and two timelines a point
    for plot in plots:
        ElementTree.fromstring(plot)  # noqa: S314 - our own


def test_tables_and_progress(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--num-requests 2 --procs 1 --input-len 9 --output-len 3 --vocab-size 384 --compare-model scripted"
    flags = ["--url", server.base, *load.split(), "--compare", server.base, "--rounds", "1"]
    assert main(["bench", "serve", *flags]) == 0
    shown = capsys.readouterr().out
    assert "requests answered           2 of 2" in shown
    assert re.search(r"^TTFT( +[\d.]+){5}$", shown, re.MULTILINE)
    assert re.search(r"^output_tokens_per_second +[\d.]+ \(", shown, re.MULTILINE)


def test_nobody_there(capsys: pytest.CaptureFixture[str], unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    assert main(["bench", "serve", "--url", url, "--no-progress"]) == 1
    assert "refuses connections" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", url, "--model", "m", "--warmup", "0", "--procs", "1"]) == 1
    assert "error connection_refused × 16" in capsys.readouterr().out


def test_a_wrong_key(capsys: pytest.CaptureFixture[str], server: ServerProcess) -> None:
    assert main(["bench", "serve", "--url", server.base + "/nowhere", "--no-progress"]) == 1
    assert "HTTP 404: There is no route GET /nowhere/v1/models here." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--workload jsonl", "needs --prompts"),
        ("--workload trace", "needs --trace"),
        ("--hidden 5", "--hidden is for --workload embeds or mixed or interleaved"),
        ("--embeds-as stored", "--embeds-as is for --workload embeds or mixed"),
        ("--workload embeds --hidden 5 --embeds-as stored --input-len 3", "needs an --input-len above 3"),
        ("--workload interleaved --input-len 2", "needs an --input-len of 3 or more"),
        ("--prompts x", "--prompts is for --workload jsonl"),
        ("--prefix-len 512", "less than --input-len"),
        ("--workload text --prefix-len 5", "--prefix-len is for"),
        ("--workload jsonl --prompts /nowhere/x", "can't read x: No such file"),
        ("--sweep 1,x", "is not a list of concurrencies"),
        ("--sweep 0", "is not a list of concurrencies"),
        ("--sweep 1 --concurrency 2", "--sweep excludes"),
        ("--ramp-to 5", "needs --request-rate"),
        ("--duration 5", "needs --request-rate"),
        ("--arrivals gamma", "--arrivals needs --request-rate"),
        ("--sweep 1,2 --ramp-to 5", "--ramp-to needs --request-rate"),
        ("--request-rate 5 --burstiness 2", "needs --arrivals gamma"),
        ("--request-rate 5 --duration 2 --num-requests 3", "--duration excludes"),
        ("--request-rate 0", "between"),
        ("--request-rate nan", "between"),
        ("--goodput ttft", "is not a number"),
        ("--goodput speed:5", "is not a limit such as"),
        ("--extra-body 5", "not a JSON object"),
        ("--extra-body {", "not a JSON object"),
        ("--output /nowhere/x", "can't write"),
        ("--url ftp://x", "URL of a server"),
        ("--concurrency 0", "between 1"),
        ("--concur 5", "intarsia bench serve: error: unrecognized arguments: --concur 5"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert words in refused(capsys, *flags.split())


def test_more_requests_than_a_file_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt":"a"}')
    flags = ["--workload", "jsonl", "--prompts", str(file), "--num-requests", "2"]
    assert "the file has only 1" in refused(capsys, *flags)


def test_every_flag_states_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    actions = parser._actions[1:]
    assert len(actions) > 30
    assert all("(default: " in str(action.help) for action in actions)


def test_an_interrupted_run_keeps_what_it_has(server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "all.json"
    command = [sys.executable, "-m", "server.cli", "bench", "serve", "--url", server.base, "--sweep", "64,1"]
    # One by one they take 64 times as long as all at once: the second point isn't over before the signal is there.
    command += ["--num-requests", "64", "--procs", "1", "--input-len", "9", "--vocab-size", "384"]
    command += ["--output", str(output)]
    # A shell's background job ignores the signal, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    bench = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with bench:
        assert bench.stdout is not None
        any("E2EL" in line for line in bench.stdout)  # the first point's table, or the end
        bench.send_signal(signal.SIGINT)
        complaint = bench.communicate(timeout=60)[1]
    assert (bench.returncode, "Traceback" in complaint) == (130, False), complaint
    assert [point["concurrency"] for point in json.loads(output.read_text())["points"]] == [64]


def test_neither_torch_nor_transformers_is_imported() -> None:
    """A load generator starts at once, also where they are not installed."""
    code = (
        "import sys, server.cli, server.bench.command; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
