"""What a message must be like to bring images, what decides over equal blocks, and the rows that are kept of images."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.block_hash import BlockHashes, TwoWaySpan, position_offset
from runner.image_encoder import ImageEncoder
from runner.images import ImageRows
from runner.messages import DIGEST_BYTES, EMBEDDING_ID, Generate, SamplingParams, Span, VisionInfo
from runner.scheduler import Scheduler, _whole_spans
from runner.sequence import InvalidRequest, Request
from runner.stream import DeferredStream
from runner.vision import Vision

ROW_SIZE = 8
FIXED = VisionInfo("gemma3", 3, two_way=True, pixel_shape=(1, 3, 2, 2), image_rows=4, max_rows=6)
GRID = VisionInfo("qwen2_vl", 3, mrope=True, merge_size=2, pixel_shape=(0, 5), max_rows=6)


def make(
    spans: list[Span], vision: VisionInfo | None, *, prompt_len: int = 12, positions: Any = None, change: Any = bytes,
    number: int = 1, max_tokens: int = 10, salt: str = "",
) -> Request:  # fmt: skip
    """`change`: what is done to the images' frames."""
    ids = np.full(prompt_len, 7, np.int32)
    for span in spans:
        ids[span.start : span.start + span.length] = EMBEDDING_ID
    frames = [ids.tobytes(), bytes(range(16)) * sum(span.length for span in spans)]
    if positions is not None:
        frames.append(np.asarray(positions, np.int32).tobytes())
    for span in spans:
        size = 4 * int(np.prod(span.pixels)) if span.pixels else span.length * ROW_SIZE
        frames.append(change(bytes(size)) if span.pixels else bytes(size))
    message = Generate(
        0, number, 1, SamplingParams(max_tokens), tuple(spans), salt, has_positions=positions is not None
    )
    return Request.from_message(
        message, [memoryview(frame) for frame in frames], vocab_size=10, row_size=ROW_SIZE, max_model_len=64,
        block_size=4, private_cache=False, vision=vision,
    )  # fmt: skip


IMAGE = Span(2, 4, two_way=True, pixels=(1, 3, 2, 2))
GRID_IMAGE = Span(2, 6, pixels=(24, 5), grid=(1, 4, 6))


def test_an_image_beside_rows() -> None:
    request = make([IMAGE, Span(8, 2)], FIXED)
    (image,) = request.images
    assert (image.span, image.num_rows, image.pixels.shape, image.grid) == (0, 4, (1, 3, 2, 2), ())
    assert [len(rows) for rows in request.rows] == [0, 2]
    # The pixels, the rows that they become, and the rows that came.
    assert request.row_bytes == 12 * 4 + 4 * ROW_SIZE + 2 * ROW_SIZE
    request.set_rows(0, np.ones((4, ROW_SIZE), np.uint8))
    assert [(row, len(rows)) for row, rows in request.embedding_rows(3, 10)] == [(3, 3), (8, 2)]


def test_images_are_the_same_ones_only_under_one_salt() -> None:
    """By the digest the rows of encoded images are kept and found."""
    digests = [make([IMAGE], FIXED, number=number, salt=salt).images[0].digest for number, salt in enumerate("aab")]
    assert digests[0] == digests[1] != digests[2]
    assert make([IMAGE], FIXED).images[0].digest not in digests


def test_an_image_of_any_size() -> None:
    assert make([GRID_IMAGE], GRID, positions=np.zeros((3, 12))).images[0].grid == (1, 4, 6)


@pytest.mark.parametrize(
    ("span", "vision"),
    [
        (IMAGE, None),
        (Span(2, 5, two_way=True, pixels=(1, 3, 2, 2)), FIXED),
        (Span(2, 4, two_way=True, pixels=(1, 3, 2, 3)), FIXED),
        (Span(2, 4, two_way=True, pixels=(3, 2, 2)), FIXED),
        (Span(2, 4, two_way=True, pixels=(1, 3, 2, 2), grid=(1, 2, 2)), FIXED),
        (Span(2, 4, two_way=True), GRID),
        (Span(2, 7, two_way=True), FIXED),
        (Span(2, 6, pixels=(24, 5)), GRID),
        (Span(2, 6, pixels=(24, 4), grid=(1, 4, 6)), GRID),
        (Span(2, 5, pixels=(24, 5), grid=(1, 4, 6)), GRID),
        (Span(2, 6, pixels=(24, 5), grid=(1, 3, 8)), GRID),
        (Span(2, 6, pixels=(24, 5), grid=(1, -4, -6)), GRID),
        (Span(2, 6, pixels=(24, 5), grid=(4, 6)), GRID),
        (Span(2, 8, pixels=(32, 5), grid=(1, 4, 8)), GRID),
    ],
)
def test_what_is_no_image(span: Span, vision: VisionInfo | None) -> None:
    with pytest.raises(InvalidRequest):
        make([span], vision)


@pytest.mark.parametrize("change", [lambda b: b[:-4], lambda b: b + bytes(4), lambda b: b""])
def test_frames_of_another_size(change: Any) -> None:
    with pytest.raises(InvalidRequest):
        make([IMAGE], FIXED, change=change)


BAD_POSITIONS = [np.zeros((3, 11)), np.zeros((2, 12)), np.full((3, 12), -1), np.full((3, 12), 12)]


@pytest.mark.parametrize("positions", BAD_POSITIONS)
def test_bad_positions(positions: Any) -> None:
    with pytest.raises(InvalidRequest):
        make([GRID_IMAGE], GRID, positions=positions)


def test_positions_are_for_models_that_have_them() -> None:
    with pytest.raises(InvalidRequest):
        make([], FIXED, positions=np.zeros((3, 12)))
    with pytest.raises(InvalidRequest):
        make([], None, positions=np.zeros((3, 12)))


# --- the prefix cache's key -----------------------------------------------------------------------------------------

IDS = np.array([5, 6, E := EMBEDDING_ID, E, E, E, E, E, 5, 6, 7, 8], np.int32)
DIGESTS = bytes(range(6 * DIGEST_BYTES))


def links(two_way: list[tuple[int, int]] = [], positions: Any = None, digest: bytes = b"d") -> list[bytes]:  # noqa: B006
    spans = [TwoWaySpan(start, end, digest * DIGEST_BYTES) for start, end in two_way]
    given = None if positions is None else np.asarray(positions, np.int32)
    return BlockHashes(b"", 4, spans, given).extend(IDS, DIGESTS)


def shared(one: list[bytes], other: list[bytes]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_equal_rows_with_other_bounds_share_no_block_of_theirs() -> None:
    assert shared(links(), links()) == 3
    assert shared(links([(2, 8)]), links([(2, 8)])) == 3
    assert shared(links([(2, 8)]), links()) == 0
    assert shared(links([(2, 8)]), links([(2, 7)])) == 0  # the first rows see the last
    assert shared(links([(2, 8)]), links([(2, 5), (5, 8)])) == 0
    assert shared(links([(4, 8)]), links([(5, 8)])) == 1
    assert shared(links([(4, 8)]), links()) == 1


def test_the_whole_of_a_span_counts_in_each_of_its_blocks() -> None:
    assert shared(links([(2, 8)]), links([(2, 8)], digest=b"e")) == 0


def test_positions_count_where_they_are_not_the_places() -> None:
    places = np.broadcast_to(np.arange(12), (3, 12))
    moved, late = places.copy(), places.copy()
    moved[1, 3], late[:, 6:9], late[:, 9:] = 0, 5, places[:, 9:] - 3
    assert shared(links(), links(positions=places)) == 3
    assert shared(links(), links(positions=moved)) == 0
    assert shared(links(), links(positions=late)) == 1
    # Rows behind the prompt are as if they had been in it.
    assert shared(links(positions=late[:, :10]), links(positions=late)) == 3
    assert position_offset(late[:, :10].astype(np.int32)) == -3


# --- chunks ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_chunk_never_ends_within_a_span(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), max_size=5))
    spans, at = [], data.draw(st.integers(0, 3))
    for length in lengths:
        spans.append(Span(at, length, two_way=True))
        at += length + data.draw(st.integers(0, 3))
    request = make(spans, FIXED, prompt_len=at + 3)
    inside = {row for span in spans for row in range(span.start + 1, span.start + span.length)}
    computed = 0
    while computed < request.prompt_len:
        budget = data.draw(st.integers(1, 6))
        rows = _whole_spans(request, computed, min(budget, request.prompt_len - computed), 6)
        assert 0 < rows <= 6
        computed += rows
        assert computed not in inside
    assert all(request.unsplit(row) == row for row in range(request.prompt_len) if row not in inside)


def test_a_span_that_does_not_fit_waits() -> None:
    request = make([Span(2, 4, two_way=True)], FIXED)
    assert [_whole_spans(request, 0, rows, most) for rows, most in ((2, 2), (3, 3), (5, 5), (6, 6))] == [2, 2, 2, 6]
    assert [_whole_spans(request, 2, rows, most) for rows, most in ((1, 3), (3, 4), (5, 5))] == [0, 4, 5]


def test_a_span_is_not_held_up_by_those_that_decode() -> None:
    """It may be longer than the chunks that others' decodes allow; what the step has beside them is enough for it."""
    scheduler = Scheduler(
        num_slots=2, num_blocks=40, block_size=4, max_model_len=64, max_num_batched_tokens=5, max_admitted_rows=80,
        chunked_prefill_size=2,
    )  # fmt: skip
    text, image = make([], FIXED, number=1, max_tokens=20), make([IMAGE], FIXED, number=2)
    scheduler.add(text)
    chunks: list[int] = []
    for at in range(13):
        if at == 3:
            scheduler.add(image)
        step = scheduler.schedule()
        assert step is not None
        counts = np.diff(step.starts).tolist()
        chunks += [rows for s, rows in zip(step.sequences, counts, strict=True) if s.request is image]
        scheduler.retire(step, np.ones(step.num_entries, np.int64))
    assert len(scheduler.requests) == 2  # both go on
    assert chunks == [2, 4, 2, 2, 2, 1, 1, 1, 1, 1]  # the second is the image's


def test_a_hit_within_a_span_is_cut_back() -> None:
    """To the block in which the span begins; and on, if that is within another one."""
    scheduler = Scheduler(
        num_slots=2, num_blocks=20, block_size=4, max_model_len=64, max_num_batched_tokens=16, max_admitted_rows=80
    )
    request = make([Span(3, 4, two_way=True), Span(9, 5, two_way=True)], FIXED, prompt_len=16)
    for hit, kept in ((0, 0), (1, 0), (2, 2), (3, 2), (4, 4)):
        blocks = scheduler.pool.allocate(hit)
        assert scheduler._cut_back(request, blocks) == blocks[:kept]
        assert scheduler.pool.num_used == kept
        scheduler.pool.release(blocks[:kept])


# --- rows that are kept ---------------------------------------------------------------------------------------------


def test_what_was_not_asked_for_goes_first() -> None:
    kept = ImageRows(30)
    images = {name: np.full((size, 1), size, np.uint8) for name, size in ((b"a", 10), (b"b", 20), (b"c", 5))}
    kept.put(b"a", images[b"a"])
    kept.put(b"b", images[b"b"])
    assert kept.get(b"a") is images[b"a"]
    kept.put(b"c", images[b"c"])
    assert kept.get(b"b") is None
    assert kept.get(b"a") is images[b"a"] and kept.get(b"c") is images[b"c"]
    assert kept.num_bytes == 15
    kept.put(b"d", np.zeros((31, 1), np.uint8))
    kept.put(b"a", images[b"b"])
    assert kept.get(b"d") is None and kept.get(b"a") is images[b"a"] and kept.num_bytes == 15


# --- turns ----------------------------------------------------------------------------------------------------------


class Encoder:
    """`vision.Vision`, as far as it is used: every image takes four rows."""

    def encode(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(4, ROW_SIZE // 4)


def test_lower_priorities_first_and_clients_in_turn() -> None:
    encoder = ImageEncoder(cast(Vision, Encoder()), DeferredStream(), cache_bytes=0)
    # (client, priority) of requests 0, 1, 2, …
    for number, (client, priority) in enumerate([(0, 5), (0, 5), (1, 5), (0, 0), (1, 7), (2, -1)]):
        request = make([IMAGE], FIXED, number=number)
        request.client, request.priority = client, priority
        encoder.add(request)
    order = []
    while encoder:
        order += [request.key[1] for request in encoder.advance()]
    assert order == [5, 3, 2, 0, 1, 4]
    assert encoder.encoded == 6
