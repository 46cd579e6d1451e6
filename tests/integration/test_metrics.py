"""Metrics of a real engine: whatever happens to requests, every family counts the same requests and the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from operator import ge
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.real_server import RealServer, as_safetensors
from tests.models import HIDDEN_SIZE
from tests.server.harness import Stream, eventually

LONG = 400
REQUEST_FAMILIES = (
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_inference_time_seconds_count",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
    "request_params_n_count",
    "request_params_max_tokens_count",
)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Two slots: more than two choices queue."""
    folder = tmp_path_factory.mktemp("metrics")
    options = {"dtype": "float32", "max_num_seqs": 2, "api_workers": 2, "vllm_metrics": True}
    with RealServer(folder, llama, **options) as server:
        yield server.wait_ready()


def scrape(server: RealServer) -> dict[str, float]:
    """`name`, and `name{value}` where there is a label beside the model's."""
    with server.client() as client:
        text = client.get("/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
    return found


def ended(found: dict[str, float]) -> dict[str, float]:
    start = "intarsia:request_success_total{"
    return {name[len(start) : -1]: value for name, value in found.items() if name.startswith(start)}


def stream(server: RealServer, **fields: object) -> Stream:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": LONG, "ignore_eos": True, "stream": True, **fields}
    return Stream(server.port, "/v1/completions", body)


def post(server: RealServer, **fields: object) -> int:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
    with server.client() as client:
        return client.post("/v1/completions", json=body).status_code


def total(found: dict[str, float], name: str) -> float:
    """Over a label's values."""
    return sum(value for sample, value in found.items() if sample.startswith(f"intarsia:{name}{{"))


def settled(server: RealServer) -> dict[str, float]:
    """What is counted, once all that `test_every_family_agrees_whatever_happened` sends is; nothing before."""
    found = scrape(server)
    counts = [total(found, name) for name in ("request_success_total", "http_responses_total", "errors_total")]
    counts.append(found["intarsia:embedding_decode_seconds_count"])
    return found if all(map(ge, counts, (11, 14, 4, 2))) and found["intarsia:num_requests_running"] == 0 else {}


def at_rest(server: RealServer) -> dict[str, float]:
    """What is counted once the engine has told that it has found a prefix, and has nothing to do any more."""
    found = scrape(server)
    used = found["intarsia:num_requests_running"] + found["intarsia:kv_cache_blocks_used"]
    return found if found["intarsia:prefix_cache_hits_total"] >= 32 and not used else {}


def test_every_family_agrees_whatever_happened(server: RealServer) -> None:
    rows = as_safetensors(torch.randn(5, HIDDEN_SIZE))
    assert post(server) == 200
    assert post(server, n=3) == 200
    assert post(server, prompt=[[5, 6], [7, 8, 9]], n=2, max_tokens=1) == 200
    assert post(server, prompt=None, prompt_embeds=rows) == 200
    assert post(server, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False) == 200
    assert post(server, echo=True, logprobs=0, max_tokens=0) == 200
    # Gone while they run, gone while they wait: behind choices that keep both slots for a minute.
    running = stream(server, n=128)
    next(running.events)
    before = scrape(server)
    waiting = [stream(server) for _ in range(3)]
    eventually(lambda: scrape(server)["intarsia:num_requests_waiting"] > 62)
    assert scrape(server)["intarsia:num_tokens_waiting"] > 62 * 3
    for each in waiting:
        each.close()
    eventually(lambda: ended(scrape(server))["abort"] == 3)
    running.close()
    # Bad ones: never queued.
    assert post(server, temperature=9) == 400
    assert post(server, prompt_embeds="AAAA", prompt=None) == 400
    assert post(server, max_tokens=10**6) == 400
    assert post(server, model="another") == 404

    # An API process counts an answer behind its last byte, when the client may already have gone on.
    found = eventually(lambda: settled(server))
    assert ended(found) == {"stop": 1, "length": 6, "abort": 4, "error": 0}
    for name in REQUEST_FAMILIES:
        assert found[f"intarsia:{name}"] == 11, name
        assert found[f"vllm:{name}"] == 11, name
    tokens = found["intarsia:generation_tokens_total"]
    assert tokens == found["intarsia:request_generation_tokens_sum"]
    first, later = (found[f"intarsia:{name}_seconds_count"] for name in ("time_to_first_token", "inter_token_latency"))
    assert tokens == first + later
    assert found["intarsia:prompt_tokens_total"] == found["intarsia:request_prompt_tokens_sum"]
    assert found["intarsia:prompt_tokens_total"] - before["intarsia:prompt_tokens_total"] == 0, "none of them ran"
    assert found["intarsia:request_params_n_sum"] == 1 + 3 + 2 + 2 + 1 + 1 + 1 + 128 + 3
    assert found["intarsia:errors_total{invalid_value}"] == 2
    assert found["intarsia:errors_total{context_length_exceeded}"] == 1
    assert found["intarsia:errors_total{model_not_found}"] == 1
    assert found["intarsia:http_responses_total{400}"] == 3
    assert found["intarsia:http_responses_total{499}"] == 4
    assert found["intarsia:http_responses_total{200}"] == 6
    assert found["intarsia:embedding_rows_total"] == 5
    assert found["intarsia:embedding_bytes_total"] == 5 * HIDDEN_SIZE * 4
    assert found["intarsia:embedding_decode_seconds_count"] == 2  # one of them in vain
    assert found["intarsia:grammar_compile_seconds_count"] == 1


def test_the_engine_s_families_agree(server: RealServer) -> None:
    assert post(server, prompt=list(range(5, 45)), max_tokens=8) == 200
    assert post(server, prompt=list(range(5, 45)), max_tokens=8) == 200
    found = eventually(lambda: at_rest(server))  # The engine's figures come later.
    steps = found["intarsia:engine_steps_total{eager}"]
    assert found["intarsia:engine_steps_total{captured}"] == 0
    for name in ("engine_step_seconds", "iteration_tokens_total", "engine_step_sequences"):
        assert found[f"intarsia:{name}_count"] == steps
    # Each row of a step is a prompt's or carries a token on; a choice's last token is never an input.
    assert found["intarsia:iteration_tokens_total_sum"] >= found["intarsia:computed_prompt_tokens_total"]
    assert found["intarsia:prompt_tokens_cached_total"] >= 32
    assert 0 < found["intarsia:engine_step_seconds_sum"] < 600
    assert found["intarsia:kv_cache_blocks"] > found["intarsia:kv_cache_blocks_used"] == 0
