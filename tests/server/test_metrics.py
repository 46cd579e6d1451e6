"""/metrics: what is declared, what is exported, and that every family counts the same requests and the same tokens."""

from __future__ import annotations

import ast
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from runner.messages import STEP_SECONDS_BOUNDS, HistogramCounts, ModelInfo, Stats
from server.errors import ERROR_CODES
from server.metric_families import FAMILIES, PREFIX, VLLM_PREFIX, Family
from server.metrics import Metrics

ROOT = Path(__file__).parents[2]
MODEL = ModelInfo("/models/m", "llama", "float16", 8, 100, 512, 16, 65, 4)


def exported_name(family: Family) -> str:
    return family.name + ("_total" if family.kind == "counter" else "")


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By name and the labels' values, but `model_name`."""
    text = metrics.exposition()[0].decode()
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def table_row(family: Family) -> str:
    labels = f"`{family.label}`" if family.label else ""
    vllm = "yes" if family.in_vllm else ""
    return f"| `{exported_name(family)}` | {family.kind} | {labels} | {vllm} | {family.text} |"


def test_the_page_for_operators_lists_every_metric() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    expected = "\n".join(map(table_row, FAMILIES))
    assert expected in page, f"the table of docs/operations.md should be:\n{expected}"


def test_every_declared_family_is_exported_and_nothing_else() -> None:
    metrics = Metrics("m")
    metrics.model = MODEL
    names = [each.name for each in text_string_to_metric_families(metrics.exposition()[0].decode())]
    assert [name.removeprefix(PREFIX) for name in names if not name.startswith("process_")] == [
        family.name for family in FAMILIES
    ]


def test_vllm_has_its_own_names_if_they_are_asked_for() -> None:
    """Names and labels are those of vLLM's loggers.py: what the gateway's scorers, KEDA and Grafana's boards query."""
    metrics = Metrics("m", as_vllm=True)
    metrics.model = MODEL
    metrics.stats = Stats(running=3, waiting=2, blocks_used=16, blocks_total=64)
    text = metrics.exposition()[0].decode()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0',
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 0.0',
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 0.0',
        'vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 0.0',
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 0.0',
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 0.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0',
        'vllm:num_preemptions_total{engine="0",model_name="m"} 0.0',
    ):
        assert line in text.splitlines()
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    for label in ('block_size="16"', 'num_gpu_blocks="65"', 'enable_prefix_caching="True"'):
        assert label in info
    names = {each.name.removeprefix(VLLM_PREFIX) for each in text_string_to_metric_families(text)}
    assert names & {family.name for family in FAMILIES} == {family.name for family in FAMILIES if family.in_vllm}
    assert VLLM_PREFIX not in Metrics("m").exposition()[0].decode()


def test_the_engine_s_histograms_come_through() -> None:
    metrics = Metrics("m")
    assert samples(metrics)["intarsia:engine_step_seconds_count",] == 0
    counts = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
    counts[0], counts[2], counts[-1] = 5, 7, 1
    metrics.stats = Stats(steps=13, captured_steps=12, step_seconds=HistogramCounts(tuple(counts), 21.5))
    found = samples(metrics)
    assert found["intarsia:engine_step_seconds_bucket", "0.001"] == 5
    assert found["intarsia:engine_step_seconds_bucket", "0.002"] == 5
    assert found["intarsia:engine_step_seconds_bucket", "0.003"] == 12
    assert found["intarsia:engine_step_seconds_bucket", "10.0"] == 12
    assert found["intarsia:engine_step_seconds_bucket", "+Inf"] == 13
    assert found["intarsia:engine_step_seconds_sum",] == 21.5
    assert found["intarsia:engine_steps_total", "captured"] == 12
    assert found["intarsia:engine_steps_total", "eager"] == 1


def test_every_error_code_is_declared() -> None:
    """An undeclared one would be counted as "other"."""
    found = {
        keyword.value.value
        for path in (ROOT / "server").rglob("*.py")
        if "bench" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
    }
    assert found <= set(ERROR_CODES)
    metrics = Metrics("m")
    metrics.count_error("model_not_found")
    metrics.count_error("server_error")
    metrics.count_error("unheard of")
    assert metrics.errors.values() == {"model_not_found": 1, "server_error": 1, "other": 1}
