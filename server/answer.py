"""The answer to one HTTP request: all its choices, from the engine's events to deltas.

`open_answer` queues the prompts; what they become is taken from the `Answer` as deltas, whole or streamed;
`Answer.close` aborts what has not ended. Choice indices are OpenAI's: prompt index × n + the choice's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runner.messages import SamplingParams, TokenLogprobs
from server.bad_words import bad_word_ids
from server.batch import Batch, EngineRequest
from server.choices import Choice, ChoiceOptions, Delta, TokenRecord
from server.detokenizer import Detokenizer
from server.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from server.generation import ChoiceEvent, Direct
from server.hidden_states import HiddenStates, hidden_bytes
from server.inputs import Prompt
from server.request_context import current_request
from server.sampling import common_params, params_for_prompt
from server.schemas import CompletionRequest, GenerationRequest
from server.services import Services
from server.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 1 << 22
"""Values that one answer holds of its prompts: about 300 MB of JSON."""
_LOGPROB_BYTES = 72
"""Of a value's JSON, roughly."""


class PromptAnswer:
    """The choices of one prompt."""

    def __init__(
        self,
        prompt: Prompt,
        first_index: int,
        n: int,
        tokenizer: Tokenizer,
        options: ChoiceOptions,
        *,
        echo: bool,
        prompt_logprobs: bool,
        skip_special_tokens: bool,
        shown_special: frozenset[int] = frozenset(),
        hidden: HiddenStates | None = None,
    ) -> None:
        self.num_rows = len(prompt)
        self.first_index = first_index
        self.cached_tokens = 0
        self._missing = len(prompt) - 1 if prompt_logprobs else 0
        """Prompt positions whose log-probabilities have not come yet. Choices wait for them."""
        self.entries: list[TokenLogprobs | None] = [None]
        """Of the prompt's positions, as far as they have come and were asked for."""
        self._early: list[ChoiceEvent] = []
        self._echo = _Echo(prompt, tokenizer, skip_special_tokens) if echo else None
        self.choices = [
            Choice(
                first_index + each,
                _detokenizer(prompt, tokenizer, skip_special_tokens, echo=echo, shown_special=shown_special),
                options,
                echo="" if self._echo is None else self._echo.text,
            )
            for each in range(n)
        ]
        self._hidden = hidden
        self._prompt_logprobs = prompt_logprobs
        if not self._missing:
            self._add_prompt_records()

    @property
    def plain_choice(self) -> Choice | None:
        """As `Answer.plain_choice`."""
        is_plain = len(self.choices) == 1 and self._hidden is None and not self._missing
        return self.choices[0] if is_plain else None

    def feed(self, event: ChoiceEvent) -> Sequence[Delta]:
        if event.started is not None and event.choice == 0:
            self.cached_tokens = event.started.cached_tokens
        if event.hidden and self._hidden is not None:
            self._hidden.add(event.hidden)
        if not self._missing:
            delta = self._feed_choice(event)
            return () if delta is None else (delta,)
        for part in event.prompt_logprobs:
            self.entries.extend(part.entries)
            self._missing -= len(part.entries)
        self._early.append(event)
        if self._missing > 0:
            return ()
        self._missing = 0
        self._add_prompt_records()
        early, self._early = self._early, []
        return [delta for delta in map(self._feed_choice, early) if delta is not None]

    def _feed_choice(self, event: ChoiceEvent) -> Delta | None:
        choice = self.choices[event.choice]
        delta = choice.feed(event.tokens, event.logprobs, event.end)
        if self._hidden is not None and delta is not None and delta.finish_reason is not None:
            delta.hidden = self._hidden.take(event.choice, choice.num_tokens)
        return delta

    def _add_prompt_records(self) -> None:
        if self._echo is not None and self._prompt_logprobs:
            records = self._echo.records(self.entries)
            for choice in self.choices:
                choice.prompt = records


class _Echo:
    """The prompt as text, and where in it each token begins. A soft prompt before it has no text."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_ids = prompt.token_ids
        self._soft_rows = prompt.soft_rows
        detokenizer = tokenizer.detokenizer((), at_start=True, skip_special_tokens=skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in prompt.token_ids]
        # Not flushed: half a character at its end is for the choice to complete.
        as_sent = prompt.text if skip_special_tokens else None
        self.text = "".join(pieces) if as_sent is None else as_sent
        self._pieces = pieces

    def records(self, entries: Sequence[TokenLogprobs | None]) -> list[TokenRecord]:
        records, offset = [], 0
        for token_id, piece, entry in zip(self._token_ids, self._pieces, entries[self._soft_rows :], strict=True):
            # A normalised text's pieces may add up to more than the text that was sent.
            records.append(TokenRecord(token_id, entry, min(offset, len(self.text))))
            offset += len(piece)
        return records


def _detokenizer(
    prompt: Prompt, tokenizer: Tokenizer, skip_special_tokens: bool, *, echo: bool, shown_special: frozenset[int]
) -> Detokenizer:
    """A completion's text is that of its own tokens, as transformers decodes them: the same behind ids and behind the
    same prompt's embeddings, which have no ids. So the bytes of a character that the prompt's last id began do not
    become that character, unless the prompt is echoed in front of them.

    Decoders that are not made of bytes need the prompt all the same: from it they know whether a space comes first.
    """
    before: Sequence[int] = prompt.tail_ids if echo or not tokenizer.vocabulary.is_exact else ()
    return tokenizer.detokenizer(before, skip_special_tokens=skip_special_tokens, shown=shown_special)


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompts are counted once, whatever `n` is; completion tokens over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer:
    """A request that the engine has accepted."""

    def __init__(self, prompts: Sequence[PromptAnswer], batch: Batch) -> None:
        self.prompts = prompts
        self._batch = batch
        self._prompt_tokens = sum(each.num_rows for each in prompts)
        self._completion_tokens = 0
        self._unfinished = sum(len(each.choices) for each in prompts)

    @property
    def usage(self) -> Usage:
        """So far."""
        cached = sum(each.cached_tokens for each in self.prompts)
        return Usage(self._prompt_tokens, self._completion_tokens, cached)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has its `finish_reason`."""
        return not self._unfinished

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Have `on_news` called, in the caller's context, when there may be something to `take`; None: no more."""
        self._batch.listen(on_news)

    @property
    def plain_choice(self) -> Choice | None:
        """The only choice, if what is new of it at a token is at most a text."""
        return self.prompts[0].plain_choice if len(self.prompts) == 1 else None

    def take_directly(self, direct: Direct) -> None:
        """Have `direct` called with each token of `plain_choice`, which it counts in its `num_tokens`, until it returns
        False or there is other news. To be called when there is nothing to `take`."""
        self._batch.take_directly(direct)

    def take(self) -> Sequence[Delta] | None:
        """What one event of the engine has become, which may be nothing; None: there is no event at the moment.
        Raises APIError, also when none will come any more though the answer is not complete."""
        taken = self._batch.take()
        if taken is None:
            if self._unfinished and self._batch.has_ended:
                raise EngineFailed
            return None
        index, event = taken
        prompt = self.prompts[index]
        deltas = prompt.feed(event)
        for delta in deltas:
            self._completion_tokens += delta.num_new_tokens
            if delta.finish_reason is not None:
                self._unfinished -= 1
                if isinstance(delta.stop_reason, str):  # a stop string, of which the engine knows nothing
                    self._batch.abort(index, delta.index - prompt.first_index)
        return deltas

    async def deltas(self) -> AsyncGenerator[Delta]:
        """All of them, until the answer is complete. Raises APIError."""
        news = asyncio.Event()
        self.listen(news.set)
        try:
            while not self.is_complete:
                await news.wait()
                news.clear()
                while (deltas := self.take()) is not None:
                    for delta in deltas:
                        yield delta
        finally:
            self.listen(None)

    def close(self) -> None:
        self._batch.close()


async def open_answer(
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    services: Services,
    answer_id: str = "",
    *,
    grammar: str = "",
    keep_records: bool = False,
    shown_special: frozenset[int] = frozenset(),
) -> Answer:
    """Check the parameters against the model and queue every prompt. `answer_id`: by which it can be aborted.
    `grammar`: what every choice must match (see `grammars`). `keep_records`: deltas have token records even if the
    client does not want to see them. `shown_special`: special tokens that become text although others are skipped.

    Raises APIError.
    """
    n = request.num_made
    sampling = await sampling_params(request, prompts, services, grammar)
    held = hidden_bytes(request, [len(each) for each in prompts], sampling, services.model)
    services.answer_memory.reserve(held + _LOGPROB_BYTES * n * _num_prompt_logprobs(prompts, sampling))
    _note(request, services, answer_id, sampling[0], n)
    answers = []
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        answers.append(
            _prompt_answer(
                request,
                prompt,
                index * n,
                n,
                params,
                services,
                keep_records=keep_records,
                shown_special=shown_special,
            )
        )
        await asyncio.sleep(0)  # an echo costs milliseconds, and there may be a thousand
    requests = [
        EngineRequest(prompt.rows, params, n, request.cache_salt or "", request.priority or 0)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    return Answer(answers, await Batch.open(services.engine, requests))


def _note(request: GenerationRequest, services: Services, answer_id: str, sampling: SamplingParams, n: int) -> None:
    """For the request's trace, and by which id the runner knows its answer."""
    context = current_request.get()
    if context is not None:
        context.model = request.model or services.model_name(None)
        context.answer_id, context.sampling, context.choices = answer_id, sampling, n
        context.stream = bool(request.stream)


async def sampling_params(
    request: GenerationRequest, prompts: Sequence[Prompt], services: Services, grammar: str = ""
) -> list[SamplingParams]:
    """Each prompt's. Raises APIError for what this model or server cannot do."""
    if request.priority and not services.honour_priority:
        raise UnsupportedParameter(
            "priority must be 0: this server was started without --scheduling-policy priority.", param="priority"
        )
    common = msgspec.structs.replace(common_params(request, services.model, services.defaults), grammar=grammar)
    if request.bad_words:
        words = await bad_word_ids(request.bad_words, services.tokenizer)
        common = msgspec.structs.replace(common, bad_words=words)
    limit = services.model.max_model_len
    sampling = [
        params_for_prompt(common, request, prompt_tokens=len(prompt), max_model_len=limit, param=prompt.param)
        for prompt in prompts
    ]
    _check_size(prompts, sampling, request.num_made)
    hidden_bytes(request, [len(each) for each in prompts], sampling, services.model)
    return sampling


def _check_size(prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], n: int) -> None:
    """Every choice repeats its prompt's log-probabilities, and the whole answer is in memory at once."""
    if _num_prompt_logprobs(prompts, sampling) * n > MAX_PROMPT_LOGPROBS:
        param = "prompt_logprobs" if sampling[0].logprobs is None else "logprobs"
        raise InvalidRequest(
            f"{param}: at most {MAX_PROMPT_LOGPROBS} values of the prompts fit into one answer (tokens, times one more"
            " than are asked for at each, times choices).",
            param=param,
        )


def _num_prompt_logprobs(prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> int:
    return sum(
        len(prompt) * (1 + params.prompt_logprobs)
        for prompt, params in zip(prompts, sampling, strict=True)
        if params.prompt_logprobs is not None
    )


def _prompt_answer(
    request: GenerationRequest,
    prompt: Prompt,
    first_index: int,
    n: int,
    params: SamplingParams,
    services: Services,
    *,
    keep_records: bool,
    shown_special: frozenset[int],
) -> PromptAnswer:
    options = ChoiceOptions(
        stop=tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        min_tokens=params.min_tokens,
        client_stop_ids=frozenset(request.stop_token_ids or ()),
        keep_records=keep_records or params.logprobs is not None or bool(request.return_token_ids),
    )
    mode = request.return_hidden_states
    return PromptAnswer(
        prompt,
        first_index,
        n,
        services.tokenizer,
        options,
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        prompt_logprobs=params.prompt_logprobs is not None,
        skip_special_tokens=request.skip_special_tokens is not False,
        shown_special=shown_special,
        hidden=None if mode is None else HiddenStates(mode, len(prompt) + params.latent_steps, n, services.model),
    )
