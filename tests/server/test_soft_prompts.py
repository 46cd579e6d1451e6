"""Soft prompts: what their files must be, how requests name them, and the rows that become of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from openai.types import Model

from runner.messages import EMBEDDING_ID, ModelInfo, Span
from server.chat_template import ChatTemplate
from server.prompt import PromptRows
from server.services import Services
from server.soft_prompts import SoftPromptError, SoftPrompts
from tests.models import HIDDEN_SIZE
from tests.server.completion_calls import embedding
from tests.server.fakes import MODEL, NAMES, Api, FakeEngine, RecordsHarness, ids_of, say, services, tokenizer

ROWS = EMBEDDING_ID
ADAPTER = {
    "peft_type": "PROMPT_TUNING",
    "task_type": "CAUSAL_LM",
    "num_virtual_tokens": 3,
    "token_dim": HIDDEN_SIZE,
    "num_layers": 2,
    "num_attention_heads": 4,
    "base_model_name_or_path": "somewhere/else",
}


def values(rows: int, width: int = HIDDEN_SIZE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.linspace(-1, 1, rows * width, dtype=np.float32).reshape(rows, width)


def bare(folder: Path, rows: int = 3) -> Path:
    path = folder / "bare.safetensors"
    safetensors.numpy.save_file({"anything": values(rows)}, path)
    return path


def adapter(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **config}))
    safetensors.numpy.save_file(
        {"prompt_embeddings": values(3)} if tensors is None else tensors, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.fixture
def model(tmp_path: Path) -> ModelInfo:
    config = {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return msgspec.structs.replace(MODEL, path=str(tmp_path))


@pytest.fixture
def soft(tmp_path: Path, model: ModelInfo) -> SoftPrompts:
    return SoftPrompts.load([("poet", str(bare(tmp_path))), ("clerk", str(adapter(tmp_path / "clerk")))], model)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_folder_and_a_file_are_the_same_rows(soft: SoftPrompts) -> None:
    assert list(soft.rows) == ["poet", "clerk"]
    assert bytes(soft.rows["poet"].data) == bytes(soft.rows["clerk"].data) == values(3).tobytes()
    assert len(soft.rows["poet"].digests) == 3 * 16


def test_rows_are_cast_to_the_models_dtype(tmp_path: Path, model: ModelInfo) -> None:
    half = SoftPrompts.load([("a", str(bare(tmp_path)))], msgspec.structs.replace(model, dtype="float16"))
    assert bytes(half.rows["a"].data) == values(3).astype(np.float16).tobytes()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "LORA"}, "it is no soft prompt"),
        ({"peft_type": "PREFIX_TUNING"}, "keys and values of every layer"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "depend on a task"),
        ({"peft_type": "CPT"}, "projection"),
        ({"peft_type": None}, "no PEFT adapter"),
        ({"peft_type": ["PROMPT_TUNING"]}, "no PEFT adapter"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "CAUSAL_LM"),
        ({"token_dim": 128}, "trained for another model: its token_dim is 128, this model's is 64"),
        ({"num_layers": 24}, "trained for another model: its num_layers is 24"),
        ({"num_attention_heads": 5}, "its num_attention_heads is 5"),
        ({"num_virtual_tokens": 4}, "num_virtual_tokens 4, but there are 3 rows"),
        ({"num_virtual_tokens": None}, "num_virtual_tokens must be"),
        ({"num_virtual_tokens": True}, "num_virtual_tokens must be"),
        ({"tensors": {"prompt_embeddings": values(3, 32)}}, "rows are 32 wide"),
        ({"tensors": {"prompt_embeddings": values(3), "more": values(3)}}, "exactly one tensor"),
        ({"tensors": {"prompt_embeddings": values(3).astype(np.float64)}}, "dtype"),
        ({"tensors": {"prompt_embeddings": values(3) * np.float32("nan")}}, "NaN"),
        ({"tensors": {"prompt_embeddings": values(128)}, "num_virtual_tokens": 128}, "at most 127"),
    ],
)
def test_adapters_that_are_refused(changes: dict[str, Any], told: str, tmp_path: Path, model: ModelInfo) -> None:
    path = adapter(tmp_path / "adapter", **changes)
    with pytest.raises(SoftPromptError, match=told) as caught:
        SoftPrompts.load([("poet", str(path))], model)
    assert str(caught.value).startswith("soft prompt poet: ")


def test_files_that_are_refused(tmp_path: Path, model: ModelInfo) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x02.")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("[" * 100_000)
    np.save(tmp_path / "rows.npy", values(3))
    (tmp_path / "long.safetensors").write_bytes(bytes(8) + b"{" + bytes(1 << 20))
    for name, told in (
        ("pickled", "pickle"),
        ("broken", "JSON object"),
        ("rows.npy", "not a safetensors file"),
        ("long.safetensors", "longer than"),
        ("nothing", "cannot read"),
        (".", "cannot read"),
    ):
        with pytest.raises(SoftPromptError, match=told):
            SoftPrompts.load([("poet", str(tmp_path / name))], model)


def test_names_that_are_taken(tmp_path: Path, model: ModelInfo) -> None:
    path = str(bare(tmp_path))
    with pytest.raises(SoftPromptError, match="twice"):
        SoftPrompts.load([("poet", path), ("poet", path)], model)
    tokenizer().transformers.save_pretrained(tmp_path)
    for names in (["m", "m:poet"], ["m:poet", "m"]):
        with pytest.raises(SoftPromptError, match="m:poet is a name of the model itself"):
            Services.load(
                FakeEngine(say("")),
                model,
                RecordsHarness().responses,
                served_model_names=names,
                soft_prompts=[("poet", path)],
            )


# --- by `model` -------------------------------------------------------------------------------------------------------


def submitted(route: str, body: dict[str, Any], soft: SoftPrompts, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the engine got, and the answer."""
    engine = FakeEngine(say("yes"))
    response = Api(services(engine, soft_prompts=soft, **options)).post(route, body)
    assert response.status_code == 200, response.text
    return [each.prompt for each in engine.submitted], response.json()


@pytest.mark.parametrize("base", NAMES)
def test_rows_go_before_every_prompt(soft: SoftPrompts, base: str) -> None:
    name = f"{base}:poet"
    data, _ = embedding(2)
    body = {"model": name, "prompt": ["What", "is"], "prompt_embeds": data}
    prompts, answer = submitted("/v1/completions", body, soft)
    assert answer["model"] == name
    assert [each.token_ids.tolist() for each in prompts] == [
        [ROWS] * 5,
        [ROWS] * 3 + ids_of("What"),
        [ROWS] * 3 + ids_of("is"),
    ]
    assert prompts[0].spans == (Span(0, 3), Span(3, 2))
    assert answer["usage"]["prompt_tokens"] == 5 + 3 + len(ids_of("What")) + 3 + len(ids_of("is"))
    for each in prompts:  # the very same, never hashed again
        assert each.rows[0] is soft.rows["poet"].data
        assert each.row_digests.startswith(soft.rows["poet"].digests)


def test_before_parts_and_their_hints(soft: SoftPrompts) -> None:
    rows = {"type": "prompt_embeds", "data": embedding(2)[0], "token_ids": [5, None]}
    parts = [{"type": "token_ids", "token_ids": [7]}, rows]
    (prompt,), _ = submitted("/v1/completions", {"model": f"{NAMES[0]}:poet", "prompt": parts}, soft)
    assert prompt.token_ids.tolist() == [ROWS] * 3 + [7] + [ROWS] * 2
    assert prompt.spans == (Span(0, 3), Span(4, 2))
    assert prompt.hint_ids.tolist() == [ROWS] * 3 + [5, ROWS]


def test_chat(soft: SoftPrompts) -> None:
    """Before the whole template, its first token and all."""
    messages = [{"role": "user", "content": "What?"}]
    (plain,), _ = submitted("/v1/chat/completions", {"messages": messages}, soft)
    body = {"messages": messages, "model": f"{NAMES[0]}:clerk"}
    (prompt,), _ = submitted("/v1/chat/completions", body, soft)
    assert prompt.token_ids.tolist() == [ROWS] * 3 + plain.token_ids.tolist()
    (prompt,), _ = submitted("/v1/responses", {"input": "What?", "model": f"{NAMES[0]}:clerk"}, soft)
    assert prompt.token_ids.tolist() == [ROWS] * 3 + plain.token_ids.tolist()


def test_echo_and_log_probabilities_are_of_the_text(soft: SoftPrompts) -> None:
    """The first token, too: it has something before it."""
    body = {"model": f"{NAMES[0]}:poet", "prompt": "What is", "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    _, answer = submitted("/v1/completions", body, soft)
    (choice,) = answer["choices"]
    assert choice["text"] == "What isyes"
    ids = ids_of("What is")
    assert len(choice["logprobs"]["tokens"]) == len(ids) + len(ids_of("yes")) + 1  # the end
    assert None not in choice["logprobs"]["token_logprobs"]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert len(choice["prompt_logprobs"]) == 3 + len(ids)
    _, answer = submitted("/v1/completions", {**body, "max_tokens": 0}, soft)
    assert answer["choices"][0]["text"] == "What is"


def test_token_ids_and_rendering(soft: SoftPrompts) -> None:
    body = {"model": f"{NAMES[0]}:poet", "prompt": "What", "return_token_ids": True}
    _, answer = submitted("/v1/completions", body, soft)
    assert answer["choices"][0]["prompt_token_ids"] == [None] * 3 + ids_of("What")
    client = Api(services(FakeEngine(say("")), soft_prompts=soft))
    (rendered,) = client.post("/v1/completions/render", body).json()
    assert (rendered["prompt"], rendered["token_ids"]) == ("What", [None] * 3 + ids_of("What"))
    assert client.post("/tokenize", {"model": body["model"], "prompt": "What"}).json()["tokens"] == ids_of("What")


def test_not_for_embeddings_of_texts(soft: SoftPrompts) -> None:
    """Whether a mean is over the soft prompt's rows, too, is for nobody to guess."""
    client = Api(services(FakeEngine(say("")), soft_prompts=soft))
    refused = client.post("/v1/embeddings", {"model": f"{NAMES[0]}:poet", "input": "x"}).json()["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "model")


def test_the_context_is_shared_with_the_rows(soft: SoftPrompts) -> None:
    client = Api(
        services(FakeEngine(say("")), soft_prompts=soft, model=msgspec.structs.replace(MODEL, max_model_len=8))
    )
    body: dict[str, Any] = {"model": f"{NAMES[0]}:poet", "max_tokens": 1}
    assert client.post("/v1/completions", {**body, "prompt": [5] * 4}).status_code == 200
    refused = client.post("/v1/completions", {**body, "prompt": [5] * 5})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    cut = client.post("/v1/completions", {**body, "prompt": [5] * 50, "truncate_prompt_tokens": -1})
    assert (cut.status_code, cut.json()["usage"]["prompt_tokens"]) == (200, 7)


def test_before_position_ids(soft: SoftPrompts) -> None:
    """Of models that count an image's rows in three dimensions: all of it moves back."""
    positions = np.array([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]], np.int32)
    prompt = PromptRows(np.array([5, ROWS, ROWS, 6], np.int32), (Span(1, 2),), bytes(32), (b"",), positions)
    moved = prompt.behind(soft.rows["poet"])
    assert moved.positions is not None and moved.positions.dtype == np.int32
    assert moved.positions[:, :3].tolist() == [[0, 1, 2]] * 3
    assert (moved.positions[:, 3:] == positions + 3).all()
    assert len(moved.frames) == 3 + 2
    assert np.frombuffer(moved.frames[2], np.int32).tolist() == moved.positions.ravel().tolist()


# --- by a part --------------------------------------------------------------------------------------------------------


def part(name: str) -> dict[str, Any]:
    return {"type": "soft_prompt", "name": name}


def test_anywhere_in_a_prompt(soft: SoftPrompts) -> None:
    text = {"type": "text", "text": "What"}
    (prompt,), _ = submitted("/v1/completions", {"prompt": [text, part("poet"), text, part("clerk")]}, soft)
    assert prompt.token_ids.tolist() == ids_of("What") + [ROWS] * 3 + ids_of("What") + [ROWS] * 3
    # It is the operator's, not a client's: whether these may send embeddings is another question.
    (prompt,), _ = submitted("/v1/completions", {"prompt": [part("poet")]}, soft, enable_prompt_embeds=False)
    assert prompt.token_ids.tolist() == [ROWS] * 3


def test_anywhere_in_a_chat(soft: SoftPrompts) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, part("poet"), {"type": "text", "text": "b"}]}
    ]
    template = ChatTemplate(tokenizer(), "{{ messages[0].content }}")
    body = {"messages": messages, "model": f"{NAMES[0]}:clerk"}
    (prompt,), _ = submitted("/v1/chat/completions", body, soft, chat_template=template)
    assert prompt.token_ids.tolist() == [ROWS] * 3 + ids_of("a") + [ROWS] * 3 + ids_of("b")


def test_what_does_not_go_with_a_part(soft: SoftPrompts) -> None:
    client = Api(services(FakeEngine(say("")), soft_prompts=soft))
    for option, value in (("echo", True), ("truncate_prompt_tokens", 5)):
        error = client.post("/v1/completions", {"prompt": [part("poet")], option: value}).json()["error"]
        assert error["param"] == option
    long = client.post("/v1/completions", {"prompt": [part("poet")] * 43, "max_tokens": 1})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


# --- names ------------------------------------------------------------------------------------------------------------


def test_unknown_names_are_404(soft: SoftPrompts) -> None:
    engine = FakeEngine(say(""))
    client = Api(services(engine, soft_prompts=soft))
    base = NAMES[0]
    user = [{"role": "user", "content": [part("x" * 10**5)]}]
    for route, body, param in (
        ("/v1/completions", {"model": f"{base}:other", "prompt": "x"}, "model"),
        ("/v1/completions", {"model": f"{base}:", "prompt": "x"}, "model"),
        ("/v1/completions", {"model": ":poet", "prompt": "x"}, "model"),
        ("/v1/completions", {"model": "poet", "prompt": "x"}, "model"),
        ("/v1/completions", {"model": f"{base}:poet:poet", "prompt": "x"}, "model"),
        ("/v1/chat/completions", {"model": f"{base}:other", "messages": user}, "model"),
        ("/v1/completions", {"prompt": [[part("poet")], [part("other")]]}, "prompt[1][0].name"),
        ("/v1/chat/completions", {"messages": user}, "messages[0].content[0].name"),
    ):
        response = client.post(route, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", param)
        assert len(error["message"]) < 300
    assert not engine.submitted


def test_the_list_of_models(soft: SoftPrompts) -> None:
    client = Api(services(FakeEngine(say("")), soft_prompts=soft))
    cards = client.get("/v1/models").json()["data"]
    expected = {f"{base}:{name}": base for base in NAMES for name in ("poet", "clerk")}
    assert [card["id"] for card in cards] == [*NAMES, *expected]
    for card in cards:
        Model.model_validate(card, strict=True)
        assert card["parent"] == expected.get(card["id"])
        assert client.get(f"/v1/models/{card['id']}").json() == card
    assert client.get(f"/v1/models/{NAMES[0]}:other").status_code == 404


def test_other_rows_under_a_name_show_in_the_fingerprint(soft: SoftPrompts, tmp_path: Path, model: ModelInfo) -> None:
    other = SoftPrompts.load([("poet", str(bare(tmp_path, 2)))], model)
    prints = {
        services(FakeEngine(say("")), soft_prompts=each).system_fingerprint for each in (SoftPrompts(), soft, other)
    }
    assert len(prints) == 3


def test_they_show_in_it_without_a_prefix_cache(
    tmp_path: Path, model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows have no digests."""
    monkeypatch.setattr("server.row_values._is_hashing", False)
    digests = set()
    for value in (0.5, 0.25):
        path = tmp_path / f"{value}.safetensors"
        path.write_bytes(safetensors.numpy.save({"rows": np.full((3, HIDDEN_SIZE), value, np.float32)}))
        digests.add(SoftPrompts.load([("poet", str(path))], model).digest)
    assert len(digests) == 2
