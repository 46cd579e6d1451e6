"""`return_hidden_states`: the last hidden states of an answer, put together from what the runner sends (`answer` feeds
it) and handed out with each choice's end.

The state at position p is what the token at p + 1 was chosen from. Of a prompt of P rows and a choice of G tokens,
"all" is 0 … P + G - 2, "answer" P - 1 … P + G - 2 (one state a token), "last" P + G - 2 alone. Where nothing is
generated (G = 0) the prompt's last position takes the place of P + G - 2. Latent steps are rows of the prompt here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from runner.messages import HiddenRows, ModelInfo, SamplingParams
from server.errors import EngineFailed
from server.file_tensor import ITEM_BYTES
from server.rows_out import RowsOut, check_size
from server.schemas import GenerationRequest

Mode = Literal["last", "answer", "all"]


def asked_of_runner(request: GenerationRequest) -> Literal["", "last", "answer", "all"]:
    """Only this side knows which token is the last where a stop string may end the answer: it then gets them all."""
    mode = request.return_hidden_states
    return "answer" if mode == "last" and request.stop else mode or ""


def hidden_bytes(
    request: GenerationRequest, prompt_rows: Sequence[int], sampling: Sequence[SamplingParams], model: ModelInfo
) -> int:
    """The most that an answer to these prompts may hold of hidden states. Raises InvalidRequest where that is too
    much."""
    if request.return_hidden_states is None:
        return 0
    num_rows = 0
    for rows, params in zip(prompt_rows, sampling, strict=True):
        answer, whole = params.max_tokens, rows + params.latent_steps + params.max_tokens
        made = {"all": whole, "answer": answer}.get(params.return_hidden_states, 1)
        num_rows += made * request.num_made
    advice = "Ask for fewer tokens (max_tokens), fewer choices, or return_hidden_states: last without stop strings."
    row_bytes = model.hidden_size * ITEM_BYTES[model.dtype]
    return check_size(num_rows, row_bytes, param="return_hidden_states", advice=advice)


class HiddenStates:
    """Of one prompt's choices."""

    def __init__(self, mode: Mode, prompt_len: int, n: int, model: ModelInfo) -> None:
        self._mode, self._model = mode, model
        self._prompt_len = prompt_len
        self._row_bytes = model.hidden_size * ITEM_BYTES[model.dtype]
        self._shared: list[HiddenRows] = []
        """The prompt's, which come with the first choice's."""
        self._own: list[list[HiddenRows]] = [[] for _ in range(n)]

    def add(self, rows: Sequence[HiddenRows]) -> None:
        for each in rows:
            (self._shared if each.start < self._prompt_len - 1 else self._own[each.choice]).append(each)

    def take(self, choice: int, num_tokens: int) -> HiddenBlock:
        """A choice's, once it has ended with so many tokens. Raises EngineFailed where some have not come."""
        end = self._prompt_len + max(num_tokens - 1, 0)
        begin = {"all": 0, "answer": self._prompt_len - 1, "last": end - 1}[self._mode]
        own, self._own[choice] = self._own[choice], []
        if choice == 0:
            parts = [*self._cut([*self._shared, *own], begin, end)]
        else:  # its own first row is not taken from another choice's computation
            parts = [*self._cut(self._shared, begin, self._prompt_len - 1), *self._cut(own, begin, end)]
        if sum(map(len, parts)) != (end - begin) * self._row_bytes:
            raise EngineFailed("The engine has lost hidden states of this answer.")
        rows = RowsOut("hidden_states", parts, end - begin, self._model.hidden_size, self._model.dtype)
        return HiddenBlock(rows, begin)

    def _cut(self, rows: Sequence[HiddenRows], begin: int, end: int) -> Iterator[memoryview]:
        """What of `rows` is at positions begin … end - 1."""
        size = self._row_bytes
        for each in rows:
            first = max(begin - each.start, 0)
            last = min(end - each.start, len(each.rows) // size)
            if first < last:
                yield memoryview(each.rows)[first * size : last * size]


class HiddenBlock:
    """One choice's hidden states."""

    def __init__(self, rows: RowsOut, start: int) -> None:
        self.rows, self.start = rows, start

    @property
    def num_records(self) -> int:
        """So many tokens' log-probabilities take as long to format."""
        return self.rows.nbytes // 256

    def body(self) -> dict[str, object]:
        """The member `hidden_states` of a choice."""
        return {**self.rows.body(), "start": self.start}
