"""The playground in a real browser, against a real server. Skipped where no Chromium is installed; CI installs one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer

from tests.browser.chromium import Chromium, find_chromium
from tests.integration.real_server import RealServer
from tests.models import EOS_ID, embed, hf_generate, hf_logits
from tests.server.harness import eventually

KEY = "a-key"
TOKENS = 12


@pytest.fixture(scope="module")
def program() -> str:
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def rows(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = AutoTokenizer.from_pretrained(llama).encode(" capital of France")
    path = tmp_path_factory.mktemp("rows") / "capital.safetensors"
    safetensors.torch.save_file({"rows": embed(llama, ids)}, path)
    return path


@pytest.fixture(scope="module")
def server(program: str, llama: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """With one slot, so that an answer of many choices takes as long as a test wants."""
    options: dict[str, Any] = {"dtype": "float32", "api_keys": [KEY], "soft_prompts": [["poet", str(rows)]]}
    with RealServer(tmp_path_factory.mktemp("server"), llama, max_num_seqs=1, **options) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def browser(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium, server: RealServer) -> Iterator[Chromium]:
    """Opened, with the key given, and greedy. It may complain of nothing."""
    browser.resize(1280, 860)
    browser.prefer("light")
    browser.complaints.clear()
    browser.open(f"{server.base}/", f"if (origin !== 'null') sessionStorage.setItem('api_key', {KEY!r})")
    browser.until("document.querySelector('#model').options.length")
    browser.run(
        f"document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = {TOKENS}"
    )
    yield browser
    assert browser.complaints == []


def send(page: Chromium) -> str:
    """The answer to what has been put together, as the page shows it."""
    turns = page.run("document.querySelectorAll('.turn').length")
    page.run("document.querySelector('#pieces textarea').focus()")
    page.press("Enter", ctrl=True)
    page.until(f"document.querySelectorAll('.turn').length > {turns} && document.querySelector('#stop').hidden")
    assert page.run("document.querySelector('#problem').hidden"), page.run(
        "document.querySelector('#problem').textContent"
    )
    shown = "[...document.querySelector('.turn:last-child .answer').childNodes]"
    seen = f"{shown}.filter((node) => !node.classList?.contains('unseen')).map((node) => node.textContent).join('')"
    return str(page.run(seen))


def answer_to(model: Path, *pieces: str) -> tuple[list[int], list[int], str]:
    """By transformers: the prompt's ids, the answer's, and its text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    tokens = hf_generate(model, ids, TOKENS, ignore_eos=False)
    return ids, tokens, str(tokenizer.decode(tokens, skip_special_tokens=True))


def change_requests(page: Chromium, fields: dict[str, Any]) -> None:
    """On their way, so that the model does what no control of the page makes it do."""
    page.run(f"""(() => {{
        const send = window.fetch;
        window.fetch = (url, options) => {{
            if (options?.method !== "POST") return send(url, options);
            const body = {{ ...JSON.parse(options.body), ...{json.dumps(fields)} }};
            return send(url, {{ ...options, body: JSON.stringify(body) }});
        }};
    }})()""")


def write(page: Chromium, text: str, piece: int = 0) -> None:
    page.run(f"document.querySelectorAll('#pieces textarea')[{piece}].focus()")
    page.type(text)


def test_a_chat_of_two_turns(page: Chromium, llama: Path) -> None:
    template = "<bos><turn>user\nWhat is it?<eos>\n<turn>assistant\n"
    write(page, "What is it?")
    first = send(page)
    assert first == answer_to(llama, template)[2]
    write(page, "And why?")
    again = template + first + "<eos>\n<turn>user\nAnd why?<eos>\n<turn>assistant\n"
    assert send(page) == answer_to(llama, again)[2]
    note = page.run("document.querySelector('.turn:last-child .note').textContent")
    assert "rows in" in note and "tokens out" in note


def test_an_embedding_between_two_texts(page: Chromium, llama: Path, rows: Path) -> None:
    """Put together with the keyboard and a file, in both kinds of request."""
    for mode, before, after in (("completion", "", ""), ("chat", "<bos><turn>user\n", "<eos>\n<turn>assistant\n")):
        page.run(f"document.querySelector('#mode-{mode}').click()")
        write(page, "What is the")
        page.choose_file("#file", rows)
        page.until("document.querySelectorAll('#pieces li').length === 2")
        chip = page.run("document.querySelector('#pieces .chip').textContent")
        assert chip.startswith("capital.safetensors") and "× 64 F32" in chip
        page.run("document.querySelector('#add-text').click()")
        write(page, "?", 1)
        assert send(page) == answer_to(llama, before + "What is the", " capital of France", "?" + after)[2]
        assert "capital.safetensors" in page.run("document.querySelector('.turn:last-child .question').textContent")


def test_a_soft_prompt_by_part_and_by_name(page: Chromium, llama: Path) -> None:
    page.run("document.querySelector('#mode-completion').click()")
    expected = answer_to(llama, " capital of France", "What")[2]
    page.run("(() => { const soft = document.querySelector('#add-soft'); soft.value = 'poet';"
             " soft.dispatchEvent(new Event('change')); })()")  # fmt: skip
    page.run("document.querySelectorAll('#pieces .tools button')[3].click()")  # the rows go up
    write(page, "What")
    assert send(page) == expected
    page.run("document.querySelector('#model').value = 'm:poet'")
    write(page, "What")
    assert send(page) == expected


def test_tokens_show_their_probability(page: Chromium, llama: Path) -> None:
    """By pointer, and by the keys, from one token to the next."""
    page.run("document.querySelector('#mode-completion').click()")
    ids, tokens, _ = answer_to(llama, "What is the answer?")
    write(page, "What is the answer?")
    send(page)
    assert page.run("document.querySelectorAll('.answer .token').length") == len(tokens)
    expected = hf_logits(llama, ids + tokens).softmax(-1)[len(ids) - 1 : -1]
    shown = page.run("[...document.querySelectorAll('.answer .token')].map((span) => span.className)")
    for place, (token, kind) in enumerate(zip(tokens, shown, strict=True)):
        probability = float(expected[place, token])
        if token != EOS_ID and abs(probability * 10 - round(probability * 10)) > 0.01:
            assert kind.split()[1] == f"p{min(int(probability * 10), 9)}"

    def told() -> list[str]:
        page.until("!document.querySelector('#details').hidden")
        found: list[str] = page.run(
            "[...document.querySelectorAll('#details .alternative span')].map((e) => e.textContent)"
        )
        return found

    def percents(place: int) -> list[str]:
        best = torch.topk(expected[place], 5).values * 100
        return [f"{float(value):.1f} %" if value >= 0.1 else "<0.1 %" for value in best]

    page.hover(".answer .token:nth-child(2)")
    assert told()[:5] == percents(1)
    page.run("document.querySelector('.answer').focus()")
    page.press("ArrowRight")
    assert told()[:5] == percents(2)
    page.press("Home")
    assert told()[:5] == percents(0)
    page.press("Escape")
    assert page.run("document.querySelector('#details').hidden")
    page.run("document.querySelector('#tokens').click()")
    assert page.run("document.querySelector('.answer').className") == "answer"


def test_what_a_model_says_is_text(page: Chromium) -> None:
    """Also where it is markup."""
    hostile = "<img src=x onerror='document.title=1'><script>document.title=2</script>&lt;b&gt;"
    change_requests(page, {"max_tokens": 200, "structured_outputs": {"choice": [hostile]}})
    for shows_tokens in (True, False):
        page.run(f"document.querySelector('#tokens').checked = {str(shows_tokens).lower()}")
        write(page, "<b>Say it</b>")
        assert send(page) == hostile
        assert page.run("document.querySelector('.turn:last-child .question').textContent") == "<b>Say it</b>"
    assert page.run("document.querySelectorAll('.turn img, .turn script, .turn b').length") == 0
    assert page.run("document.title") == "Intarsia"


def test_errors_are_told_and_the_prompt_stays(page: Chromium) -> None:
    page.run("document.querySelector('#max_tokens').value = 100000")
    write(page, "What?")
    page.press("Enter", ctrl=True)
    page.until("!document.querySelector('#problem').hidden")
    assert "maximum context length" in page.run("document.querySelector('#problem').textContent")
    assert page.run("document.querySelector('#pieces textarea').value") == "What?"
    assert page.run("document.querySelectorAll('.turn').length") == 0
    forgive(page)


def forgive(page: Chromium) -> None:
    """What the browser notes of an error's status, once it has."""
    eventually(lambda: page.run("true") and page.complaints)
    page.complaints.clear()


AT_END = (
    "view => view.scrollHeight > 2 * view.clientHeight && view.scrollHeight - view.scrollTop - view.clientHeight < 120"
)


def test_an_answer_can_be_stopped(page: Chromium, server: RealServer) -> None:
    page.run("document.querySelector('#max_tokens').value = 450")
    change_requests(page, {"ignore_eos": True, "n": 128})  # which would take two minutes
    write(page, "What?")
    page.press("Enter", ctrl=True)
    # However fast they come and however many there are, the page has time for a key.
    page.until("document.querySelectorAll('.answer .token').length > 3000")
    page.until("document.querySelector('#running').textContent === '1'")
    assert page.run(f"({AT_END})(document.querySelector('#transcript'))")
    page.press("Escape")
    page.until("document.querySelector('#stop').hidden")
    assert page.run("document.querySelector('.note').textContent") == "stopped"
    page.until("document.querySelector('#running').textContent === '0'")  # the engine has let go of it
    assert page.run("document.querySelectorAll('.answer .token').length") < 128 * 450


INSTANT = """
const whole = new TextEncoder().encode(event.repeat(count) + "data: [DONE]\\n\\n");
const fetched = window.fetch;
window.fetch = (url, options) => options?.method !== "POST" ? fetched(url, options) : Promise.resolve(
  new Response(new ReadableStream({ start(stream) { stream.enqueue(whole); stream.close(); } })));
"""
"""An answer of so many events that comes at once."""


def test_an_answer_that_is_there_already_leaves_the_page_its_turns(page: Chromium) -> None:
    seen = page.run(
        """(async (event, count) => {"""
        + INSTANT
        + """
        const { post } = await import("/playground/stream.js");
        let seen = 0, atTurn = null;
        for await (const each of post("/completions", {})) {
          if (!seen) setTimeout(() => { atTurn = seen; });
          seen += each.count;
        }
        return [atTurn, seen];
        })('data: {"count": 1}\\n\\n', 300000)"""
    )
    assert seen[1] == 300_000
    assert seen[0] is not None
    assert seen[0] < seen[1]


def test_the_page_is_not_laid_out_for_each_token(page: Chromium) -> None:
    token = {"token": "word ", "bytes": [*b"word "], "logprob": -0.5, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "word "}, "logprobs": {"content": [token]}, "finish_reason": None}
    event = json.dumps(f"data: {json.dumps({'choices': [choice]})}\n\n")
    page.run(
        f"((event, count) => {{ {INSTANT} }})({event}, 2000);"
        """
        const view = document.querySelector("#transcript");
        const height = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight").get;
        window.looked = 0;
        Object.defineProperty(view, "scrollHeight", { get() { window.looked++; return height.call(this); } });
        """
    )
    write(page, "What?")
    page.press("Enter", ctrl=True)
    page.until("document.querySelectorAll('.answer .token').length === 2000 && document.querySelector('#stop').hidden")
    assert page.run(f"({AT_END})(document.querySelector('#transcript'))")
    assert 0 < page.run("window.looked") < 400


def test_the_engine_is_seen(page: Chromium, server: RealServer) -> None:
    write(page, "Four blocks of 16 rows, and so their prefix is kept. " * 4)
    send(page)
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        config = client.get("/playground/config").json()

        def labels_are_right() -> bool:
            """Those of a moment in which the engine is idle; what was in use before is cached then."""
            metrics = client.get("/metrics").text
            (cached,) = re.findall(r"^intarsia:kv_cache_blocks_cached\{.*\} (\d+)", metrics, re.MULTILINE)
            labels = page.run("['slots', 'blocks'].map((id) => document.getElementById(id).getAttribute('aria-label'))")
            slots, blocks = config["max_num_seqs"], config["num_blocks"]
            return bool(labels == [f"0 of {slots} slots in use", f"0 of {blocks} KV blocks in use, {cached} cached"])

        eventually(labels_are_right)
    # What is in use (nothing), what is cached, what is empty: the squares have two colours.
    colours = """(() => {
        const canvas = document.querySelector('#blocks');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer).filter((pixel) => pixel >>> 24 === 255)).size;
    })()"""
    assert page.run(colours) >= 2


def test_the_key_is_asked_for_and_kept_for_the_tab_alone(browser: Chromium, server: RealServer) -> None:
    browser.open(f"{server.base}/", "if (origin !== 'null') sessionStorage.clear()")
    browser.until("!document.querySelector('#problem').hidden")
    assert "API key" in browser.run("document.querySelector('#problem').textContent")
    assert browser.run("document.activeElement.id") == "key"
    browser.type(KEY)
    browser.press("Tab")
    browser.until("document.querySelector('#model').options.length")
    assert browser.run("sessionStorage.getItem('api_key')") == KEY
    assert browser.run("localStorage.length + document.cookie.length") == 0
    assert browser.run("document.querySelector('#problem').hidden")
    forgive(browser)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_any_width_in_light_and_dark(page: Chromium, width: int) -> None:
    write(page, "a_word_without_an_end" * 20)
    send(page)
    page.resize(width, 700)
    colours = set()
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        assert page.run("document.documentElement.scrollWidth") <= width
        colours.add(page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
