"""lm-eval's `local-completions` against a running server, on tasks whose right answers are known.

    python -m tests.compat.lm_eval_local http://127.0.0.1:8000 [API_KEY]

Two tasks, written to a temporary folder: a choice among four, scored by log-likelihood (`echo`, `logprobs` and
`max_tokens` 1 on token ids), and a continuation, scored by what is generated. The tokenizer is the server's own, from
afar (/tokenizer_info, /tokenize, /detokenize). Prints the scores; exit status 1 where they are no better than a guess,
which is what a server without prompt log-probabilities gets.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

CHOICES = (
    ("The capital of France is", ("Paris", "London", "Tokyo", "Cairo")),
    ("The opposite of hot is", ("cold", "green", "seven", "wood")),
    ("Two plus two equals", ("four", "red", "Monday", "slowly")),
    ("The sun rises in the", ("east", "soup", "keyboard", "north")),
    ("A week has seven", ("days", "oceans", "legs", "moons")),
    ("Cats say", ("meow", "woof", "moo", "hello")),
    ("Water is made of hydrogen and", ("oxygen", "gold", "sugar", "paper")),
    ("The largest planet of the solar system is", ("Jupiter", "Mars", "London", "Einstein")),
    ("Shakespeare wrote the play Romeo and", ("Juliet", "Algebra", "Jupiter", "Windows")),
    ("The colour of grass is", ("green", "seven", "loud", "Tuesday")),
    ("The first month of the year is", ("January", "July", "Sunday", "winter")),
    ("A triangle has three", ("sides", "wheels", "kings", "seasons")),
    ("Bees make", ("honey", "steel", "paper", "milk")),
    ("Ice is frozen", ("water", "fire", "music", "sand")),
    ("Albert Einstein was a famous", ("physicist", "vegetable", "river", "footballer")),
    ("The Pacific is the largest", ("ocean", "violin", "insect", "number")),
)
CONTINUATIONS = (
    ("The capital of France is", "Paris"),
    ("one, two, three, four,", "five"),
    ("Monday, Tuesday, Wednesday,", "Thursday"),
    ("A, B, C, D, E,", "F"),
)
LEAST_CHOSEN = 0.6
"""Share of right choices. A guess gets a quarter."""
LEAST_CONTINUED = 0.5


def choice_task(folder: Path) -> dict[str, Any]:
    """The right choice stands at every place equally often."""
    rows = []
    for number, (question, choices) in enumerate(CHOICES):
        shift = number % 4
        rotated = [*choices[4 - shift :], *choices[: 4 - shift]]
        rows.append({"question": question, "choices": rotated, "answer": shift})
    return {
        "task": "intarsia_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **_data(folder / "choices.jsonl", rows),
    }


def continuation_task(folder: Path) -> dict[str, Any]:
    rows = [{"question": question, "answer": answer} for question, answer in CONTINUATIONS]
    first_word = {"function": "regex", "regex_pattern": r"(\w+)"}
    return {
        "task": "intarsia_continuations",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [{"name": "first_word", "filter": [first_word, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        **_data(folder / "continuations.jsonl", rows),
    }


def _data(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}


def evaluate(base: str) -> tuple[float, float]:
    """(share of right choices, share of right continuations)"""
    import lm_eval

    arguments = {
        "base_url": f"{base}/v1/completions",
        "model": _model_name(base),
        "tokenizer_backend": "auto",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        tasks = [choice_task(Path(folder)), continuation_task(Path(folder))]
        found = lm_eval.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=tasks, batch_size=4, bootstrap_iters=0
        )
    results = found["results"]
    chosen = results["intarsia_choices"]["acc,none"]
    continued = results["intarsia_continuations"]["exact_match,first_word"]
    return float(chosen), float(continued)


def _model_name(base: str) -> str:
    import requests

    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    answer = requests.get(f"{base}/v1/models", headers=headers, timeout=30)
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


def main(base: str, api_key: str = "") -> int:
    logging.disable(logging.WARNING)
    os.environ["OPENAI_API_KEY"] = api_key  # where the harness looks for it
    chosen, continued = evaluate(base.rstrip("/"))
    print(f"lm-eval local-completions: choices {chosen:.3f} (a guess: 0.250), continuations {continued:.3f}")
    return 0 if chosen >= LEAST_CHOSEN and continued >= LEAST_CONTINUED else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
