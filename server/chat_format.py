"""How chat completions are written: plain text, and (`PartsFormat`) reasoning, content and tool calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from runner.messages import TokenLogprobs
from server.chat_parts import Arguments, ChatParts, Content, Part, PartsRules, Reasoning, ToolCall
from server.choices import Delta, TokenRecord
from server.inputs import ListedIds
from server.logprobs import LogprobFormat
from server.respond import Json, WholeChoice
from server.schemas import ChatRequest
from server.services import Services


class ChatFormat:
    """`respond.Format` for chat completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    is_text_only = True

    def __init__(self, request: ChatRequest, prompt_ids: ListedIds, services: Services) -> None:
        self._with_logprobs = bool(request.logprobs)
        self._with_ids = bool(request.return_token_ids)
        self._prompt_ids = prompt_ids
        self._service_tier = request.service_tier
        self._prompt_top = request.prompt_logprobs
        self._prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._logprobs = LogprobFormat(
            services.tokenizer.vocabulary, as_token_ids=bool(request.return_tokens_as_token_ids)
        )

    def whole_choice(self, index: int, choice: WholeChoice) -> Json:
        self._prompt_logprobs = choice.prompt_logprobs  # the same for every choice
        body: Json = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs.chat(choice.tokens) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.hidden is not None:
            body["hidden_states"] = choice.hidden.body()
        if self._with_ids:
            body["token_ids"] = [record.token_id for record in choice.tokens]
        return body

    def chunk_choices(self, delta: Delta) -> Iterator[Json]:
        """The role first, then content, and the reason for the end in a chunk of its own."""
        if delta.is_first:
            yield self._chunk(delta.index, {"role": "assistant", "content": ""}, ())
        if delta.text or delta.tokens:
            yield self._chunk(delta.index, {"content": delta.text}, delta.tokens)
        if delta.finish_reason is not None:
            yield self._end_chunk(delta, delta.finish_reason)

    def extras(self) -> Json:
        extras: Json = {"service_tier": "default"} if self._service_tier is not None else {}
        if self._with_ids:
            extras["prompt_token_ids"] = self._prompt_ids
        if self._prompt_logprobs and self._prompt_top is not None:
            extras["prompt_logprobs"] = self._logprobs.prompt(self._prompt_logprobs, self._prompt_top)
        return extras

    def _chunk(self, index: int, delta: Json, tokens: Sequence[TokenRecord]) -> Json:
        body: Json = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs.chat(tokens) if self._with_logprobs and tokens else None,
            "finish_reason": None,
        }
        if self._with_ids and tokens:
            body["token_ids"] = [record.token_id for record in tokens]
        return body

    def _end_chunk(self, delta: Delta, reason: str | None) -> Json:
        end: Json = {"finish_reason": reason, "stop_reason": delta.stop_reason}
        if delta.hidden is not None:
            end["hidden_states"] = delta.hidden.body()
        return self._chunk(delta.index, {}, ()) | end

    def usage_details(self) -> Json:
        return {}


class PartsFormat(ChatFormat):
    """For models that reason, and requests with tools."""

    is_text_only = False

    def __init__(self, request: ChatRequest, prompt_ids: ListedIds, services: Services, rules: PartsRules) -> None:
        super().__init__(request, prompt_ids, services)
        self._rules = rules
        self._choices: dict[int, ChoiceParts] = {}

    def whole_choice(self, index: int, choice: WholeChoice) -> Json:
        body = super().whole_choice(index, choice)
        parts = self._parts(index)
        body["message"] = _message(parts.add(choice.text, choice.tokens, is_last=True))
        body["finish_reason"] = parts.finish_reason(choice.finish_reason)
        return body

    def chunk_choices(self, delta: Delta) -> Iterator[Json]:
        index = delta.index
        parts = self._parts(index)
        if delta.is_first:
            yield self._chunk(index, {"role": "assistant", "content": ""}, ())
        tokens = delta.tokens
        for part in parts.add(delta.text, delta.tokens, is_last=delta.finish_reason is not None):
            yield self._chunk(index, _delta(part), tokens)
            tokens = ()
        if tokens and (self._with_ids or self._with_logprobs):
            yield self._chunk(index, {"content": ""}, tokens)
        if delta.finish_reason is not None:
            yield self._end_chunk(delta, parts.finish_reason(delta.finish_reason))

    def usage_details(self) -> Json:
        if self._rules.reasoning is None:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(map(_reasoning_tokens, self._choices.values()))}}

    def _parts(self, index: int) -> ChoiceParts:
        if index not in self._choices:
            self._choices[index] = ChoiceParts(self._rules)
        return self._choices[index]


class ChoiceParts:
    """One choice: its parts, and what is counted of them."""

    def __init__(self, rules: PartsRules) -> None:
        self._rules = rules
        self._parts = ChatParts(rules)
        self._offsets: list[int] = []
        """Where the tokens begin, as long as they may belong to the reasoning. Ascending."""

    def add(self, text: str, tokens: Sequence[TokenRecord], *, is_last: bool) -> list[Part]:
        if self._parts.may_reason:
            self._offsets += [token.offset for token in tokens]
        parts = self._parts.push(text) if text else []
        return parts + self._parts.flush() if is_last else parts

    @property
    def reasoning_end(self) -> int | None:
        """How many characters of the text belong to the reasoning; None: all so far."""
        return self._parts.reasoning_end

    @property
    def is_undecided(self) -> bool:
        """Whether the text so far may be the beginning of the reasoning or of the content."""
        return self._parts.is_undecided

    @property
    def reasoning_tokens(self) -> int:
        end = self._parts.reasoning_end
        return len(self._offsets) if end is None else bisect_left(self._offsets, end)

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI has it: a call that was asked for by name is no reason, and a limit is a better one."""
        called = self._parts.num_calls and self._rules.tools.choice != "named"
        return "tool_calls" if called and reason == "stop" else reason


def _reasoning_tokens(choice: ChoiceParts) -> int:
    return choice.reasoning_tokens


def _delta(part: Part) -> Json:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCall(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}


def _message(parts: Sequence[Part]) -> Json:
    """The deltas, put together."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, Arguments):
            arguments.setdefault(part.index, []).append(part.fragment)
    calls = [_call(part, arguments) for part in parts if isinstance(part, ToolCall)]
    message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return message | {"tool_calls": calls} if calls else message


def _call(call: ToolCall, arguments: Mapping[int, Sequence[str]]) -> Json:
    function = {"name": call.name, "arguments": "".join(arguments.get(call.index, ()))}
    return {"id": call.id, "type": "function", "function": function}
