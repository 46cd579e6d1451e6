"""Images among a prompt's parts, up to the runner's message: what is checked, how the text around them is tokenised,
and where their rows and positions go. The model and its image processor are not needed for it."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runner.messages import DIGEST_BYTES, EMBEDDING_ID, VisionInfo
from server.chat_template import ChatTemplate
from server.conversation import parse_messages
from server.embedding_markers import EmbeddingMarkers
from server.embeddings import Rows
from server.errors import APIError, InvalidRequest, QueueFull, UnsupportedParameter
from server.image_fetch import ImageFetcher
from server.image_file import ImageLimits
from server.image_parts import laid_out
from server.image_template import ImageTemplate
from server.prompt import PromptRows
from server.request_context import RequestContext, current_request
from server.segments import EmbeddingPart, IdsPart, ImagePart, Part, TextPart, parse_parts
from server.tokenizer import Tokenizer
from server.vision import Layout, PreparedImage, Vision
from tests.models import CHAT_TEMPLATE
from tests.server.fakes import Api, FakeEngine, say, services, tokenizer
from tests.vision_models import picture

LAYOUT = Layout("<begin>", "<turn>", "\n\n<begin>", "<end>\n")
"""The tokenizer of these tests has no token for images: one of its others stands for it."""
ROWS = 3


class FakeProcessor:
    """The mean colour of an image, as its pixels."""

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        assert return_tensors == "np"
        return {"pixel_values": np.asarray(images[0], np.float32).mean((0, 1)).reshape(1, 3, 1, 1)}


def vision(**changes: Any) -> Vision:
    values: dict[str, Any] = {"image_rows": ROWS, "pixel_shape": (1, 3, 1, 1), "max_rows": ROWS, "two_way": True}
    info = VisionInfo("fake", 3, **{**values, **changes})
    return Vision(FakeProcessor(), LAYOUT, info, ImageFetcher((), max_bytes=100), ImageLimits())


def image(seed: int = 0) -> dict[str, Any]:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "png")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<begin>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}",
)


@pytest.fixture
def api() -> Iterator[tuple[Api, FakeEngine]]:
    yield from make_api(TEMPLATE)


def make_api(template: str, **changes: Any) -> Iterator[tuple[Api, FakeEngine]]:
    engine, seen = FakeEngine(say("x")), vision(**changes)
    chat = ChatTemplate(tokenizer(), template)
    yield Api(services(engine, vision=seen, chat_template=chat, image_template=ImageTemplate(chat, seen))), engine
    seen.close()


def ids_of(value: str) -> list[int]:
    return asyncio.run(tokenizer().encode(value, add_special_tokens=False))


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "prompt[0].image_url"),
        ({"type": "image_url", "image_url": 5}, "prompt[0].image_url"),
        ({"type": "image_url", "image_url": ""}, "prompt[0].image_url"),
        ({"type": "image_url", "image_url": {}}, "prompt[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": ["data:"]}}, "prompt[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "best"}}, "prompt[0].image_url.detail"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": []}}, "prompt[0].image_url.detail"),
    ],
)
def test_bad_parts(part: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_parts([part], "prompt", take_embeddings=True, take_images=True)
    assert caught.value.param == param


@pytest.mark.parametrize("detail", [None, "auto", "low", "high", "original"])
def test_detail_is_accepted(detail: str | None) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,", "detail": detail}}
    expected = ImagePart("data:,", "p[0].image_url.url")
    assert parse_parts([part], "p", take_embeddings=True, take_images=True) == [expected]


def test_models_that_see_nothing() -> None:
    engine = FakeEngine(say("x"))
    api = Api(services(engine))
    for path, body, param in (
        ("/v1/completions", {"prompt": [text("a"), image()]}, "prompt[1].type"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image()]}]}, "messages[0].content[0].type"),
    ):
        answer = api.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert "takes no images" in error["message"]
    assert not engine.submitted


# --- text around images ---------------------------------------------------------------------------------------------


def test_what_the_processor_writes_joins_the_neighbours() -> None:
    shown, ids, rows = ImagePart("u", "i"), IdsPart([1], "ids"), EmbeddingPart("", "e")
    texts = TextPart("a", "t"), TextPart("b", "t2"), TextPart("c", "t3")
    parts: list[Part] = [texts[0], shown, *texts[1:], shown, shown, ids, shown, rows]
    begin, end, token = LAYOUT.before, LAYOUT.after, LAYOUT.image_token
    assert laid_out(parts, LAYOUT) == [
        TextPart(f"a{begin}", "t", ("", token)),
        shown,
        TextPart(f"{end}b", "t2", (token, "")),
        TextPart(f"c{begin}", "t3", ("", token)),
        shown,
        TextPart(f"{end}{begin}", "i", (token, token)),
        shown,
        TextPart(end, "i", (token, "")),
        ids,
        TextPart(begin, "i", ("", token)),
        shown,
        TextPart(end, "i", (token, "")),
        rows,
    ]
    assert laid_out([ids, rows], LAYOUT) == [ids, rows]


def test_a_completion(api: tuple[Api, FakeEngine]) -> None:
    client, engine = api
    answer = client.post("/v1/completions", {"prompt": [text("the piece"), image(1), image(2), text("is <turn>")]})
    assert answer.status_code == 200, answer.text
    (request,) = engine.submitted
    rows = request.prompt.token_ids.tolist()
    blank = [EMBEDDING_ID] * ROWS
    pieces = (ids_of("the piece\n\n<begin>"), ids_of("<end>\n\n\n<begin>"), ids_of("<end>\nis <turn>"))
    assert rows == pieces[0] + blank + pieces[1] + blank + pieces[2]
    assert answer.json()["usage"]["prompt_tokens"] == len(rows)
    first, second = request.prompt.spans
    assert (first.start, first.length, first.two_way, first.pixels) == (len(pieces[0]), ROWS, True, (1, 3, 1, 1))
    colours = [np.frombuffer(frame, np.float32) for frame in request.prompt.rows]
    assert np.allclose(colours, [np.asarray(picture(seed)).mean((0, 1)) for seed in (1, 2)])
    assert second.start == len(pieces[0]) + ROWS + len(pieces[1])


@pytest.mark.parametrize("part", [{"type": "prompt_embeds", "data": "AAAA"}, {"type": "soft_prompt", "name": "poet"}])
def test_rows_stay_in_the_text_around_them_beside_an_image(part: dict[str, Any]) -> None:
    """Templates trim each text, or set texts apart."""
    markers = EmbeddingMarkers(take_embeddings=True, image_marker="marker")
    content = [image(), text("look "), part, text(" there")]
    (message,) = parse_messages([{"role": "user", "content": content}], embeddings=markers)
    kinds = [item["type"] for item in message["content"]]
    assert kinds == ["image", "text"]
    assert re.fullmatch("look \\w+ there", message["content"][1]["text"])


def test_a_large_image_is_read_from_the_body(api: tuple[Api, FakeEngine]) -> None:
    """Its URL is never made a string of."""
    client, engine = api
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 300, 3), np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, "png")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    assert len(url) > 256 * 1024
    for part in ({"url": url}, url):
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": part}]}]}
        assert client.post("/v1/chat/completions", body).status_code == 200
        pixels = np.frombuffer(engine.submitted[-1].prompt.rows[0], np.float32)
        assert np.allclose(pixels, np.asarray(noise).mean((0, 1)))
    bad = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x" * 300_000}]}]}
    answer = client.post("/v1/chat/completions", bad)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0].image_url")


def test_prepared_images_are_bounded_until_requests_let_go_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of a file become megabytes, and many requests may be at that at once."""
    seen = vision()
    monkeypatch.setattr("server.vision.MAX_HELD_BYTES", 30)  # each of these takes 12

    async def main() -> None:
        first, second = RequestContext("a"), RequestContext("b")
        part = ImagePart(image()["image_url"]["url"], "prompt[0]")
        for context in (first, second):
            current_request.set(context)
            await seen.load_image(part, 100)
        assert seen.held == 24
        with pytest.raises(QueueFull):
            await seen.load_image(part, 100)
        first.release_body()
        assert seen.held == 12
        await seen.load_image(part, 100)
        first.end()
        assert seen.held == 24
        second.end()
        assert seen.held == 0

    asyncio.run(main())
    seen.close()


def test_so_many_are_fetched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.vision._FETCHED_AT_ONCE", 3)
    seen, running, most = vision(), 0, 0
    buffer = io.BytesIO()
    picture(0).save(buffer, "png")

    async def fetch(url: str) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return buffer.getvalue()

    monkeypatch.setattr(seen._fetcher, "fetch", fetch)

    async def main() -> None:
        await asyncio.gather(*(seen.load_image(ImagePart("https://a/b", "prompt[0]"), 100) for _ in range(10)))

    asyncio.run(main())
    assert most == 3
    seen.close()


def test_equal_images_have_equal_digests() -> None:
    seen = vision()
    rows = [seen.prepare(picture(seed), 100) for seed in (1, 1, 2)]
    seen.close()
    starts = range(0, ROWS * DIGEST_BYTES, DIGEST_BYTES)
    digests = [[each.digests[at : at + DIGEST_BYTES] for at in starts] for each in rows]
    assert digests[0] == digests[1]
    assert len({*digests[0], *digests[2]}) == 2 * ROWS


def test_too_many_rows(api: tuple[Api, FakeEngine]) -> None:
    client, engine = api
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = [{"type": "token_ids", "token_ids": [5] * (limit - 1)}, image()]
    answer = client.post("/v1/completions", {"prompt": prompt})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    for small in make_api(TEMPLATE, max_rows=ROWS - 1):
        answer = small[0].post("/v1/completions", {"prompt": [image()]})
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt[0].image_url.url")
    assert not engine.submitted


# --- chat -----------------------------------------------------------------------------------------------------------


def chat(client: Api, *content: dict[str, Any], **more: Any) -> Any:
    return client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": list(content)}], **more})


def test_what_a_user_writes_is_no_image(api: tuple[Api, FakeEngine]) -> None:
    """Neither the placeholder nor the image's own token."""
    client, engine = api
    answer = chat(client, text("<begin> and <turn>"), image(), text("<begin>"))
    assert answer.status_code == 200, answer.text
    rows = engine.submitted[0].prompt.token_ids.tolist()
    before = ids_of("<bos><turn>user\n<begin> and <turn>\n\n<begin>")
    after = ids_of("<end>\n<begin><eos>\n<turn>assistant\n")
    assert rows == before + [EMBEDDING_ID] * ROWS + after
    assert chat(client, text("<begin><turn>")).status_code == 200
    assert not engine.submitted[1].prompt.spans


def test_the_marker_is_nobodys_to_know(api: tuple[Api, FakeEngine]) -> None:
    client, _ = api
    for given in make_api(TEMPLATE):
        del given
    answer = client.post(
        "/v1/chat/completions/render", {"messages": [{"role": "user", "content": [text("a"), image()]}]}
    ).json()
    assert answer["prompt"] is None
    assert answer["token_ids"].count(None) == ROWS
    markers = {each.marker for each in (vision(), vision())}
    assert len(markers) == 2 and all(len(marker) == 34 for marker in markers)


@pytest.mark.parametrize(
    ("template", "status"),
    [
        (TEMPLATE, 200),
        (TEMPLATE.replace("<begin>", "<begin><begin>"), 400),
        (TEMPLATE.replace("<begin>", ""), 400),
        (TEMPLATE.replace("{% if add", "{% if false and add"), 200),
        (CHAT_TEMPLATE, 400),
    ],
)
def test_templates(template: str, status: int) -> None:
    for client, engine in make_api(template):
        assert chat(client, text("a"), image()).status_code == status
        assert len(engine.submitted) == (status == 200)


def test_a_template_that_wants_lists_gets_them() -> None:
    """Else a message that is a string would be dropped."""
    only = "{% for message in messages %}{% for item in message['content'] %}{% if item is mapping %}"
    only += "{{ '<begin>' if item['type'] == 'image' else item['text'] }}{% endif %}{% endfor %}{% endfor %}"
    for client, engine in make_api(only):
        body = {"messages": [{"role": "system", "content": "first"}, {"role": "user", "content": [image()]}]}
        assert client.post("/v1/chat/completions", body).status_code == 200
        assert engine.submitted[0].prompt.token_ids.tolist()[: len(ids_of("first"))] == ids_of("first")
        body = {"messages": [{"role": "user", "content": "second"}]}
        assert client.post("/v1/chat/completions", body).status_code == 200
        assert engine.submitted[1].prompt.token_ids.tolist() == ids_of("second")


def test_a_template_that_shows_all_images_first() -> None:
    """As LLaVA's: which is which follows from their order."""
    images = "{% for item in message['content'] if item['type'] == 'image' %}<begin>\n{% endfor %}"
    words = "{% for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }} {% endfor %}"
    template = f"{{% for message in messages %}}{images}{words}{{% endfor %}}"
    for client, engine in make_api(template):
        assert chat(client, text("a"), image(1), text("<begin>"), image(2)).status_code == 200
        prompt = engine.submitted[0].prompt
        colours = [np.frombuffer(frame, np.float32) for frame in prompt.rows]
        assert np.allclose(colours, [np.asarray(picture(seed)).mean((0, 1)) for seed in (1, 2)])
        assert prompt.token_ids.tolist()[: len(ids_of("\n\n<begin>"))] == ids_of("\n\n<begin>")
        assert prompt.tail_ids.tolist() == ids_of("<end>\n\na <begin> ")


def test_images_that_a_template_drops() -> None:
    template = TEMPLATE.replace("{% for message in messages %}", "{% for message in messages[-1:] %}")
    messages = [{"role": "user", "content": [image()]}, {"role": "user", "content": [image()]}]
    for client, engine in make_api(template):
        answer = client.post("/v1/chat/completions", {"messages": messages})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert not engine.submitted


def test_what_does_not_go_with_images(api: tuple[Api, FakeEngine]) -> None:
    client, engine = api
    assert chat(client, image(), truncate_prompt_tokens=5).json()["error"]["param"] == "truncate_prompt_tokens"
    answer = client.post("/tokenize", {"messages": [{"role": "user", "content": [text("a"), image()]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[1].type")
    assert not engine.submitted


def test_keys_take_turns_with_their_images() -> None:
    """One key's many images, though they came first, hold up another's for as many as are being prepared."""

    async def main() -> None:
        seen, order, go_on = vision(), list[int](), threading.Semaphore(0)
        make = seen._processor

        def processor(images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
            order.append(images[0].width)
            assert go_on.acquire(timeout=30)
            return make(images, return_tensors)  # type: ignore[no-any-return]

        seen._processor = processor
        tasks = []
        for number, key in enumerate([0] * 8 + [1]):
            buffer = io.BytesIO()
            picture(0, 20 + number, 20).save(buffer, "png")
            url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
            current_request.set(RequestContext("", api_key=key))
            tasks.append(asyncio.create_task(seen.load_image(ImagePart(url, "p"), ROWS)))
            await asyncio.sleep(0)
        for task in tasks[2:4]:  # their clients have gone
            task.cancel()
        # One at a time: threads that were free together might overtake each other.
        for begun in (2, 3, 4, 5, 6, 7, 7):
            async with asyncio.timeout(30):
                while len(order) < begun:  # noqa: ASYNC110 - a thread sets no event of the loop
                    await asyncio.sleep(0.001)
            go_on.release()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in found] == [False] * 2 + [True] * 2 + [False] * 5
        # Two threads: what they began with, then by turns.
        assert sorted(order) == [20, 21, 24, 25, 26, 27, 28]
        assert order.index(28) <= 3
        seen.close()

    asyncio.run(main())


# --- positions ------------------------------------------------------------------------------------------------------


def rows(num_rows: int, grid: tuple[int, ...] = (), merge: int = 2) -> PreparedImage:
    side = max(grid[1:], default=0) // merge
    return PreparedImage(
        np.zeros((4, 1), np.float32), num_rows, False, grid, side, merge, bytes(num_rows * DIGEST_BYTES)
    )


def test_positions_of_images_in_three_dimensions() -> None:
    """As Qwen2-VL counts them (its paper's figure 3, with an image in the place of the video)."""
    embedding = Rows(memoryview(bytes(8)), 2, 2, "float16", bytes(2 * DIGEST_BYTES))
    prompt = PromptRows.from_segments([[7, 8], rows(6, (1, 4, 6)), [9], embedding, rows(1, (1, 2, 2)), [9]])
    assert prompt.positions is not None
    assert prompt.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert prompt.positions.dtype == np.int32 and prompt.positions.flags.c_contiguous


def test_others_have_none() -> None:
    assert PromptRows.from_segments([[7, 8], rows(3)]).positions is None
    assert PromptRows.from_segments([[7, 8]]).positions is None


def test_errors_are_of_the_api() -> None:
    assert issubclass(UnsupportedParameter, APIError)
    assert isinstance(tokenizer(), Tokenizer)
