"""Prompts with images answer as transformers does to its own processor's inputs: alone and in one batch with text and
embeddings, through chunks, preemption and caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runner.config import ClientLimits
from runner.limits import BadConfiguration
from runner.sequence import InvalidRequest
from tests.models import random_prompt
from tests.parity.harness import Harness, Picture
from tests.parity.pictures import Scene, embedded, scene
from tests.vision_models import FIXED_ROWS, VisionFamily, vision_model

TinyVision = Callable[[VisionFamily], Path]

LAYOUTS = ("ab", "0a", "a0b", "a0b1c", "abcdef01")

overlap = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


@pytest.fixture(params=["gemma3", "qwen2_vl"])
def family(request: pytest.FixtureRequest) -> VisionFamily:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def scenes(family: VisionFamily, tiny_vision_model: TinyVision) -> list[Scene]:
    path = tiny_vision_model(family)
    return [scene(path, family, layout) for layout in LAYOUTS]


@pytest.mark.parametrize("other", ["llava", "qwen2_5_vl"])
def test_the_other_families(other: VisionFamily, tiny_vision_model: TinyVision) -> None:
    """LLaVA's images are rows like any; Qwen2.5-VL differs from Qwen2-VL in its tower, which attends in windows."""
    path = tiny_vision_model(other)
    harness = Harness(path)
    asked = [scene(path, other, layout) for layout in ("ab", "a0b1c", "01")]
    numbers = [(ask(harness, each, mixed=mixed), each) for each in asked for mixed in (None, 0)]
    harness.run()
    assert all(harness.tokens(number) == each.tokens for number, each in numbers)


@pytest.fixture
def gemma3(tiny_vision_model: TinyVision) -> Path:
    return tiny_vision_model("gemma3")


def ask(harness: Harness, each: Scene, *, mixed: int | None = None, salt: str = "") -> int:
    prompt = each.pieces if mixed is None else each.mixed(mixed)
    return harness.add(prompt, positions=each.positions, salt=salt)


def test_an_image_decides_over_the_answer(scenes: list[Scene], family: VisionFamily) -> None:
    """Of the models and their seeds: with another image they say something else."""
    harness = Harness(scenes[0].path)
    for each in scenes[1:]:
        shown = [p for p in each.pieces if isinstance(p, Picture)]
        other = [Picture(p.pixels[..., ::-1].copy(), p.num_rows, p.grid) if p is shown[0] else p for p in each.pieces]
        assert harness.tokens(ask(harness, each)) == []
        number = harness.add(tuple(other), positions=each.positions)
        harness.run()
        assert harness.tokens(number) != each.tokens


def test_each_alone_and_all_together(scenes: list[Scene]) -> None:
    """Images, embeddings and text in one batch, with images among a prompt's first and last rows."""
    harness = Harness(scenes[0].path, async_scheduling=True, max_num_batched_tokens=96)
    for each in scenes:
        number = ask(harness, each, salt="alone")
        harness.run()
        assert harness.tokens(number) == each.tokens
    numbers = [(ask(harness, each), each) for each in scenes]
    numbers += [(ask(harness, each, mixed=seed), each) for seed, each in enumerate(scenes)]
    harness.run()
    assert all(harness.tokens(number) == each.tokens for number, each in numbers)
    harness.assert_empty()


def test_every_pair_of_kinds_in_one_batch(scenes: list[Scene]) -> None:
    """Text, embeddings, an image, an image with embeddings."""
    text, image = scenes[0], scenes[3]
    kinds = [(text, None), (text, 0), (image, None), (image, 0)]
    harness = Harness(text.path, async_scheduling=True)
    for salt, pair in enumerate(itertools.combinations_with_replacement(kinds, 2)):
        numbers = [(ask(harness, each, mixed=mixed, salt=str(salt)), each) for each, mixed in pair]
        harness.run()
        assert all(harness.tokens(number) == each.tokens for number, each in numbers)


def test_multimodal_requests_with_embeddings_decode_tokens(scenes: list[Scene]) -> None:
    """The failure that this design is about: with asynchronous scheduling a step's mask was stale, and every request
    but the first took its own tokens for embeddings."""
    image = scenes[3]
    harness = Harness(image.path, async_scheduling=True, enable_prefix_caching=False)
    numbers = [ask(harness, image, mixed=seed) for seed in range(6)]
    harness.run()
    assert len(image.tokens) >= 32
    assert all(harness.tokens(number) == image.tokens for number in numbers)


@overlap
def test_chunks_never_split_an_image_that_attends_both_ways(
    scenes: list[Scene], family: VisionFamily, overlap: bool
) -> None:
    """As little of a budget as there may be, while others decode."""
    harness = Harness(
        scenes[0].path, async_scheduling=overlap, block_size=4, max_num_seqs=3, chunked_prefill_size=3,
        max_num_batched_tokens=FIXED_ROWS + 2,
    )  # fmt: skip
    seen: list[tuple[int, int, int, int]] = []
    launch = harness.engine.scheduler._launch

    def watch(*args: object) -> object:
        step = launch(*args)  # type: ignore[arg-type]
        for entry, sequence in enumerate(step.sequences):
            end, start = int(step.computed[entry]), int(step.computed[entry] - np.diff(step.starts)[entry])
            seen.extend((span.start, span.end, start, end) for span in sequence.request.two_way)
        return step

    harness.engine.scheduler._launch = watch  # type: ignore[method-assign, assignment]
    numbers = [(ask(harness, each, mixed=seed), each) for seed, each in enumerate(scenes)]
    harness.run()
    assert all(harness.tokens(number) == each.tokens for number, each in numbers)
    assert bool(seen) == (family == "gemma3")
    assert not any(first < cut < end for first, end, *cuts in seen for cut in cuts)
    harness.assert_empty()


def test_hints_beside_images(scenes: list[Scene]) -> None:
    """Both are told by negative ids in the slots; neither is taken for the other."""
    harness = Harness(scenes[0].path, async_scheduling=True, max_num_batched_tokens=96)
    numbers = []
    for seed, each in enumerate(scenes):
        hints: list[int | None] = []
        mixed = each.mixed(seed)
        for piece in mixed if isinstance(mixed, tuple) else (mixed,):
            if isinstance(piece, Picture):
                hints += [None] * piece.num_rows
            elif not isinstance(piece, list):
                hints += range(len(piece))
        numbers.append((harness.add(mixed, positions=each.positions, hints=hints), each))
    harness.run()
    assert all(harness.tokens(number) == each.tokens for number, each in numbers)


@overlap
def test_preemption(scenes: list[Scene], overlap: bool) -> None:
    harness = Harness(scenes[0].path, async_scheduling=overlap, block_size=4, num_blocks=40)
    numbers = [(ask(harness, each, mixed=seed), each) for seed in (5, 6) for each in scenes]
    harness.run()
    assert harness.engine.stats().preemptions > 0
    assert all(harness.tokens(number) == each.tokens for number, each in numbers)
    harness.assert_empty()


def test_several_choices_share_the_image(scenes: list[Scene]) -> None:
    each = scenes[2]
    harness = Harness(each.path)
    number = harness.add(each.pieces, n=3, positions=each.positions)
    harness.run()
    assert [harness.tokens(number, choice) for choice in range(3)] == [each.tokens] * 3


def test_an_image_is_encoded_once(scenes: list[Scene]) -> None:
    """Whatever is around it; but anew under another salt, and once its rows had to go."""
    harness = Harness(scenes[0].path)
    encoder = harness.engine._images
    assert encoder is not None
    once, twice = scenes[2], scenes[3]
    shown: set[tuple[str, int]] = set()
    for each, salt in ((once, "a"), (once, "a"), (twice, "a"), (twice, "b"), (once, "b"), (once, "")):
        number = ask(harness, each, salt=salt)
        harness.run()
        assert harness.tokens(number) == each.tokens
        shown |= {(salt, image) for image in each.images}
        assert encoder.encoded == len(shown)
    encoder.rows._max_bytes = 0
    encoder.rows.put(b"other", np.zeros((0, 4), np.uint8))
    assert encoder.rows.num_bytes == 0
    number = ask(harness, once, salt="a")
    harness.run()
    assert harness.tokens(number) == once.tokens
    assert encoder.encoded == len(shown) + 1


def test_one_image_between_two_steps(scenes: list[Scene]) -> None:
    """A sequence that decodes gets a token for every image that others have encoded meanwhile."""
    text, image = scenes[0], scenes[3]
    harness = Harness(text.path, async_scheduling=False)
    decoding = ask(harness, text)
    harness.engine.step()
    harness.engine.step()
    others = [scene(text.path, _family(image), "a0", seed) for seed in (1, 2, 3)]
    numbers = [(ask(harness, each), each) for each in others]
    encoder = harness.engine._images
    assert encoder is not None
    before = (encoder.encoded, len(harness.tokens(decoding)))
    for count in range(1, 4):
        harness.engine.step()
        assert encoder.encoded == before[0] + count
        assert len(harness.tokens(decoding)) == before[1] + count
    harness.run()
    assert all(harness.tokens(number) == each.tokens for number, each in [*numbers, (decoding, text)])


def _family(each: Scene) -> VisionFamily:
    family: VisionFamily = vision_model(each.path).config.model_type
    return family


def test_clients_take_turns(scenes: list[Scene]) -> None:
    """One with many images doesn't keep the other's waiting."""
    one, other = scenes[2], scenes[1]
    harness = Harness(one.path, clients=(ClientLimits(), ClientLimits()))
    encoder = harness.engine._images
    assert encoder is not None
    many = [scene(one.path, _family(one), "a0", seed) for seed in (1, 2, 3)]
    numbers = [ask(harness, each) for each in many]
    last = ask(harness, other)
    (request,) = [request for request in encoder if request.key[1] == last]
    encoder.remove(request)
    request.client = 1
    encoder.add(request)
    for count in (1, 2, 3):
        harness.engine.step()
        assert encoder.encoded == count  # one a step, whoever's
    assert {request.key[1] for request in encoder} == set(numbers[1:])
    harness.run()
    assert encoder.encoded == len({image for each in (*many, other) for image in each.images})
    assert harness.tokens(last) == other.tokens
    assert all(harness.tokens(number) == each.tokens for number, each in zip(numbers, many, strict=True))


# --- the prefix cache -----------------------------------------------------------------------------------------------


def test_prefixes_are_found_and_cut_back(gemma3: Path) -> None:
    """A hit that ends inside of an image is of no use from the image's start on."""
    first, image = random_prompt(6, 1), scene(gemma3, "gemma3", "a0")
    (picture,) = [p for p in image.pieces if isinstance(p, Picture)]
    harness = Harness(gemma3, block_size=4, async_scheduling=False)

    def cached(*prompt: list[int] | Picture) -> int:
        return harness.generate(prompt, 1).cached_tokens

    # Rows 6 … 14 are the image's.
    assert cached(first, picture, [60, 61]) == 0
    assert cached(first, picture, [60, 61]) == 16
    assert cached(first, picture, [70, 71]) == 4  # block 3 differs; 1 and 2 end inside the image
    assert cached(first, picture) == 4  # its last row has to be computed: all of the image's are
    assert cached(first, picture, [60]) == 4
    other = Picture(picture.pixels + 1, picture.num_rows)
    assert cached(first, other, [60, 61]) == 4


def test_answers_from_cached_prefixes(scenes: list[Scene]) -> None:
    harness = Harness(scenes[0].path, block_size=4, async_scheduling=True)
    for _ in range(2):
        numbers = [(ask(harness, each), each) for each in scenes]
        harness.run()
        assert all(harness.tokens(number) == each.tokens for number, each in numbers)
    for each in scenes:  # as a part of a longer prompt: what was said, too
        number = harness.add((*each.pieces, each.tokens[:20]), 12, positions=_longer(each, 20))
        harness.run()
        assert harness.tokens(number) == each.tokens[20:]
        assert harness.answer(number).cached_tokens > 0
    harness.assert_empty()


def _longer(each: Scene, rows: int) -> NDArray[np.int32] | None:
    if each.positions is None:
        return None
    behind = each.positions.max() + 1 + np.arange(rows, dtype=np.int32)
    return np.concatenate([each.positions, np.broadcast_to(behind, (3, rows))], 1)


# --- what is sampled, and what is refused ---------------------------------------------------------------------------


def test_a_sampled_image_id_is_a_token(scenes: list[Scene]) -> None:
    """Its row is the table's, whatever images the prompt has."""
    each = scenes[2]
    harness = Harness(each.path)
    image_id = vision_model(each.path).config.image_token_id
    forced = harness.add(each.pieces, 4, positions=each.positions, logit_bias=((image_id, 100.0),))
    harness.run()
    assert harness.tokens(forced) == [image_id] * 4
    told = harness.add((*each.pieces, [image_id] * 4), 8, positions=_longer(each, 4), salt="ids")
    rows = (*each.pieces, embedded(each.path, [image_id] * 4))
    embeds = harness.add(rows, 8, positions=_longer(each, 4), salt="rows")
    harness.run()
    continued = harness.add(each.pieces, 12, positions=each.positions, logit_bias=(), salt="free")
    harness.run()
    assert harness.tokens(told) == harness.tokens(embeds)
    assert harness.tokens(continued) == each.tokens[:12]


def test_a_step_that_holds_no_image_is_refused_at_load(gemma3: Path) -> None:
    with pytest.raises(BadConfiguration, match="9 rows of an image in one step: --max-num-batched-tokens must be at"):
        Harness(gemma3, max_num_seqs=4, max_num_batched_tokens=FIXED_ROWS + 2)
    Harness(gemma3, max_num_seqs=3, max_num_batched_tokens=FIXED_ROWS + 2)


@pytest.mark.parametrize("change", ["pixels", "rows", "text model", "grid"])
def test_what_is_no_image_is_refused(
    change: str, scenes: list[Scene], tiny_model: Callable[[str], Path], family: VisionFamily
) -> None:
    (picture,) = [p for p in scenes[2].pieces if isinstance(p, Picture)]
    harness = Harness(tiny_model("llama") if change == "text model" else scenes[0].path)
    grid = (1, 2, 2) if not picture.grid else (1, *(side + 1 for side in picture.grid[1:]))
    wrong = {
        "pixels": Picture(picture.pixels[..., :-1].copy(), picture.num_rows, picture.grid),
        "rows": Picture(picture.pixels, picture.num_rows + 1, picture.grid),
        "text model": picture,
        "grid": Picture(picture.pixels, picture.num_rows, grid),
    }[change]
    with pytest.raises(InvalidRequest, match="image"):
        harness.add(([5, 6], wrong), 4)


# --- aborts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_aborts_at_any_time(scenes: list[Scene], steps: int) -> None:
    """While it waits, while its image is encoded, and afterwards; a choice, a request, a worker."""
    harness = Harness(scenes[0].path, async_scheduling=True)
    engine, each = harness.engine, scenes[3]
    whole = harness.add(each.pieces, n=2, positions=each.positions)
    part = harness.add(each.pieces, n=2, positions=each.positions)
    last = ask(harness, scenes[2])
    for _ in range(steps):
        engine.step()
    engine.abort((0, whole))
    engine.abort((0, part), 1)
    assert engine.stats().waiting + engine.stats().running == 2 or steps
    harness.run()
    assert harness.tokens(part) == each.tokens
    assert harness.tokens(last) == scenes[2].tokens
    assert len(harness.tokens(whole)) < 32 and len(harness.tokens(part, 1)) < 32
    harness.assert_empty()
    ask(harness, scenes[1])
    engine.abort_worker(0)
    harness.run()
    harness.assert_empty()
    assert engine.ended_sequences == 6


def test_rows_stay_as_transformers_makes_them(scenes: list[Scene], family: VisionFamily) -> None:
    """One image's rows, bit for bit but for rounding."""
    each = scenes[2]
    (picture,) = [p for p in each.pieces if isinstance(p, Picture)]
    vision = Harness(each.path).engine.model.vision
    assert vision is not None
    ours = vision.encode(torch.from_numpy(picture.pixels), picture.grid)
    grid = {"image_grid_thw": torch.tensor([picture.grid])} if picture.grid else {}
    with torch.inference_mode():
        theirs = vision_model(each.path).get_image_features(torch.from_numpy(picture.pixels), **grid).pooler_output
    torch.testing.assert_close(ours, torch.cat([*theirs]), rtol=1e-4, atol=1e-4)
