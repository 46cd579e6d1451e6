"""The messages between an API process (a *worker*) and the runner: beside `config` the only part of `runner` that
`server` imports.

Transport: ZeroMQ over unix sockets in a private folder. The runner binds one PULL socket for every worker's messages;
each worker binds one PULL socket of its own and names it in `Hello`. Every message is one msgpack frame (a tagged
array); `Generate` is followed by raw frames, in this order:

1. `token_ids`: int32 [num_rows], native byte order; `EMBEDDING_ID` at embedding rows;
2. `row_digests`: uint8 [num_embedding_rows, DIGEST_BYTES], one digest per embedding row in prompt order, taken of the
   row's bytes in the model's dtype (of short rows a few together); none for the rows of spans that name a stored
   embedding. Empty when there is none;
3. only if `has_hints`: int32 [num_embedding_rows], the token that a row stands for in the client's opinion, or
   `EMBEDDING_ID`. Penalties count it and prompt log-probabilities are told of it; nothing is computed from it;
4. only if `has_positions`: position ids, int32 [3, num_rows];
5. one frame per span: its rows, [span.length, hidden_size] in the model's dtype, C order; of an image (`Span.pixels`),
   what the image processor made of it, float32; empty where the span names a stored embedding or shared memory.

`PutRows` is followed by two frames: the digests, as in 2, and the rows, as in 5. `PutRecord` is followed by two or
three: the record's body, its turns and its will. On their way back they are frames behind a `Reply`.

A request is keyed by (worker, request), both chosen by the worker. Nothing that a client sends is ever a key.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec

EMBEDDING_ID = -1
"""Stands in `token_ids` for a row that is an embedding. Clamped before any lookup, skipped by every count."""

DIGEST_BYTES = 16


class GrammarLimits(TypedDict):
    max_items_in_row: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int


GRAMMAR_LIMITS: GrammarLimits = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""llguidance's own limits, the same wherever a grammar is compiled. They bound what one token costs the engine: its
defaults let a hostile grammar take most of a second (docs/structured_outputs.md)."""

FinishReason = Literal["stop", "length", "abort", "error"]
RejectReason = Literal["queue_full", "rows_full", "invalid", "tokens_full", "concurrency", "rate_limit", "not_found"]
"""`not_found`: a stored embedding that a span names has gone."""
StoreProblem = Literal["", "not_found", "too_large", "full", "invalid", "rate_limit"]

MAX_RECORD_BYTES = 8 << 20
"""Of one record, its turns and its body (or what that becomes, if it is larger): a larger one is not kept."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How one request's tokens are chosen. Validated by the worker; the runner only re-checks token ids."""

    max_tokens: int
    """At least 1 and at most what the prompt and `latent_steps` leave of max_model_len; 0 only together with
    `prompt_logprobs` (scoring) or `return_hidden_states`."""
    min_tokens: int = 0
    """No id of `stop_token_ids` is sampled before so many tokens."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Signed 64-bit. The worker draws one at random where the client gives none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends generation, the model's own included unless `ignore_eos` was asked for."""
    logprobs: int | None = None
    """None: off. k >= 0: the sampled token's log-probability and the k best."""
    prompt_logprobs: int | None = None
    """The same for every prompt row but the first. Such a request reads no cached prefix."""
    allowed_token_ids: tuple[int, ...] = ()
    """Not empty: no other id is ever sampled."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids, none empty, that the answer does not contain."""
    grammar: str = ""
    """What the answer must match, as llguidance takes it (JSON or Lark text). The worker has compiled it once, under
    limits of time, and so knows that it is valid. Empty: anything. A choice whose grammar is complete ends with reason
    "stop"."""
    return_hidden_states: Literal["", "last", "answer", "all", "mean"] = ""
    """Which last hidden states (behind the final norm) are sent as `HiddenRows`, by position: that at p is what the
    token at p + 1 is chosen from. Of a prompt of P rows and an answer of G tokens:

    "last": that from which the answer's last token was chosen, with the end (G = 0: the prompt's last row's);
    "answer": P - 1 … P + G - 2, one a token, as they come (G = 0: the prompt's last row's);
    "all": 0 … P + G - 2 (G = 0: 0 … P - 1), as they come. Choices other than the first are not sent the prompt's again:
    theirs begin at P - 1. The first choice reads no cached prefix;
    "mean": the mean over the prompt's rows, with the end. Needs `max_tokens` 0 and one choice; reads no cached prefix.

    Latent steps count as rows of the prompt.
    """
    latent_steps: int = 0
    """So many rows follow the prompt before the first token is chosen, each the last hidden state of the row before it.
    They take positions of the context like any others."""

    @property
    def is_plain(self) -> bool:
        """Nothing but a temperature: one kernel samples it, whatever else is in the batch."""
        asks = self.penalises or self.filters or self.edits_logits or self.grammar
        return not (asks or self.logprobs is not None)

    @property
    def penalises(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def filters(self) -> bool:
        """Tokens may be ruled out by the distribution. (Greedy takes the best one, which no filter removes.)"""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def edits_logits(self) -> bool:
        """Single logits of its own are changed."""
        return bool(self.logit_bias or self.min_tokens or self.allowed_token_ids or self.bad_words)


SHARED_PROBE = b"rows of this worker"
"""What the file in a worker's `Hello` holds."""


class SharedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows that the worker has in a file that is nowhere but in memory (memfd_create), for the runner to map: then they
    are not sent. The worker keeps the file open until it has an answer, and never writes to it again."""

    process: int
    descriptor: int
    inode: int
    """What the descriptor must still be: of a request that was given up meanwhile it may be another file."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A run of embedding rows in the prompt."""

    start: int
    length: int
    two_way: bool = False
    """Its rows attend to each other in both directions. All of them are computed in one step."""
    pixels: tuple[int, ...] = ()
    """Not empty: an image, and the shape of its frame. The runner makes the rows of it."""
    grid: tuple[int, ...] = ()
    """Of an image whose size isn't fixed: patches in time, height and width."""
    stored: str = ""
    """The id of the stored embedding that is its rows: all of them, in order."""
    shared: SharedRows | None = None
    """Where its rows are, if not in its frame."""


# --- worker to runner ---------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker's first message. Answered by `Loading` or `Ready`."""

    worker: int
    address: str
    """Where the worker's own PULL socket is bound."""
    shared: SharedRows | None = None
    """A file for the runner to try: if it can be read, `Sharing` is among the answers."""


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """One prompt, `n` choices. Followed by raw frames (see the module's docstring)."""

    worker: int
    request: int
    n: int
    sampling: SamplingParams
    spans: tuple[Span, ...] = ()
    cache_salt: str = ""
    """Requests with different salts never share cached blocks."""
    priority: int = 0
    """Signed 64-bit. Lower ones get their slots first, and lose them last; equal ones in turn (`runner.fair_queue`)."""
    client: int = 0
    """Whose it is: the number of an API key of the server's, from 0 on. Limits and turns are by client."""
    has_positions: bool = False
    """The rows' position ids are given (`VisionInfo.mrope` models). Else row i is at position i."""
    has_hints: bool = False
    """Whether there is a frame of hints."""
    answer: str = ""
    """The id of the answer that it is for, under which `AbortAnswer` finds it; several prompts may be for one. Made by
    the worker, as random as a key: not a client's words. Empty: none can be told."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The worker wants nothing more of this request (or of one choice). No `End` is sent for what it names."""

    worker: int
    request: int
    choice: int = -1
    """-1: every choice."""


class AbortAnswer(msgspec.Struct, frozen=True, array_like=True, tag="abort_answer"):
    """A client wants this answer to end, whichever worker it comes from: that one is sent `Aborted` for each of the
    answer's requests. Answered by a `Reply`, `not_found` where no request of the client's is for such an answer."""

    worker: int
    request: int
    """Counts the worker's questions, apart from `Generate`'s; so it does in all that a `Reply` answers."""
    client: int
    """As `Generate.client`."""
    answer: str


class LookUp(msgspec.Struct, frozen=True, array_like=True, tag="look_up"):
    """Asks for the model's own input rows. Followed by one raw frame: `token_ids`, int32 [n], native byte order.
    Answered by `TokenRows`, or by `Rejected`. `request` is drawn from the same numbers as `Generate.request`, and
    `client` is as there."""

    worker: int
    request: int
    client: int = 0


class WorkerGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Sent by another worker: this one has died. Everything of it is aborted, and nothing more is taken from it."""

    worker: int


class _OfOwner(msgspec.Struct, frozen=True, array_like=True):
    """A question about what one API key has: one owner's things do not exist for another. It is answered once, whatever
    the engine is doing."""

    worker: int
    request: int
    """Counts the worker's questions, apart from `Generate.request`."""
    owner: int
    """As `Generate.client`."""


# The store of embeddings. Answered by `StoreAnswer`.


class PutRows(_OfOwner, frozen=True, array_like=True, tag="put_rows"):
    """Keep these rows. Followed by raw frames (see the module's docstring)."""

    sha256: str
    """Hex, of the rows' bytes in the model's dtype."""
    shared: SharedRows | None = None
    """As `Span.shared`."""


class FindRows(_OfOwner, frozen=True, array_like=True, tag="find_rows"):
    """What is known of these; those that are not there are missing in the answer. Counts as a use of them."""

    ids: tuple[str, ...]


class ListRows(_OfOwner, frozen=True, array_like=True, tag="list_rows"):
    """One page: at most `limit`, those behind `after` (empty: from the first on)."""

    after: str
    limit: int
    newest_first: bool = True


class DeleteRows(_OfOwner, frozen=True, array_like=True, tag="delete_rows"):
    """Requests that use them go on; nobody else finds them any more."""

    id: str


# Records: what workers keep here so that all of them find it (responses that can be asked for again). To the runner
# they are bytes with an id. Answered by `Reply`.


class PutRecord(_OfOwner, frozen=True, array_like=True, tag="put_record"):
    """Keep this record, in the place of one with the same id. Followed by two raw frames: its body, and its turns, what
    it adds to a conversation (those before it are `previous`'s, and so on); and by a third one where it is still being
    made: what its body becomes if the worker dies first. `too_large`: it is not kept."""

    id: str
    previous: str = ""
    """Another record's id."""
    replaces: bool = False
    """Only in the place of one that is there, else `not_found`: one that was deleted meanwhile stays so."""


class GetRecord(_OfOwner, frozen=True, array_like=True, tag="get_record"):
    """Counts as a use of it. The reply is followed by one frame, the body; `too_large` where that has more than
    `max_bytes`."""

    id: str
    max_bytes: int = MAX_RECORD_BYTES


class GetTurns(_OfOwner, frozen=True, array_like=True, tag="get_turns"):
    """The turns of a record and of all before it: so many frames, the first one's first. `not_found` unless all of them
    are there, `too_large` where they have more than `max_bytes` together."""

    id: str
    max_bytes: int


class DeleteRecord(_OfOwner, frozen=True, array_like=True, tag="delete_record"):
    id: str


# --- runner to worker ---------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """To a question of the worker's. The only message to a worker that has frames behind it."""

    request: int
    problem: StoreProblem = ""
    size: int = 0
    """Bytes, of what is `too_large` to be sent."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="aborted"):
    """A client has ended this request (`AbortAnswer`): nothing more is sent about it."""

    request: int


class StoredInfo(msgspec.Struct, frozen=True, array_like=True):
    """A stored embedding, without its rows."""

    id: str
    rows: int
    sha256: str
    created_at: int
    """Seconds since 1970, as is `expires_at`."""
    expires_at: int


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    request: int
    entries: tuple[StoredInfo, ...] = ()
    """The one that was put or deleted, those that were found, or the page."""
    has_more: bool = False
    """There are further ones behind the page."""
    problem: StoreProblem = ""
    message: str = ""
    """Which limit it is, where `problem` is `rate_limit`."""
    retry_after: float = 0.0
    """Seconds."""


class VisionInfo(msgspec.Struct, frozen=True, array_like=True):
    """How a model takes images (`runner.vision` knows which do)."""

    family: str
    """transformers' model type of the whole, a key of `runner.vision.FAMILIES`."""
    image_token_id: int
    """The id that stands for an image's rows where transformers writes a prompt as ids."""
    two_way: bool = False
    """The rows of one image attend to each other both ways (`Span.two_way`)."""
    mrope: bool = False
    """Rows have position ids in three dimensions (`Generate.has_positions`)."""
    merge_size: int = 1
    """Patches of an image that become one row, in each direction; for images with a grid."""
    pixel_shape: tuple[int, ...] = ()
    """Of what the image processor makes of an image: [1, channels, height, width]; with a grid [patches, values], the
    first of them open (0)."""
    image_rows: int = 0
    """Rows of an image; 0 where that follows from its grid."""
    max_rows: int = 0
    """Of the largest image that is taken."""


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a worker must know of the loaded model."""

    path: str
    """The local folder that it was loaded from (config, tokenizer, generation config)."""
    model_type: str
    dtype: str
    """"float32", "float16" or "bfloat16": the dtype of embedding rows on the wire between worker and runner."""
    hidden_size: int
    """The width of an embedding row."""
    vocab_size: int
    """Ids 0 … vocab_size - 1 have a row in the embedding table."""
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    vision: VisionInfo | None = None
    """None: it takes no images."""
    embedding_scale: float = 1.0
    """What the model's own look-up multiplies table rows by (Gemma: the square root of the hidden size)."""


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram since the engine's start. Its bounds are constants that both sides know."""

    counts: tuple[int, ...] = ()
    """One for each bound (values up to it and above the one before), and one for what is above the last."""
    sum: float = 0.0


STEP_SECONDS_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
STEP_ROWS_BOUNDS = tuple(float(1 << power) for power in range(15))
STEP_SEQUENCES_BOUNDS = tuple(float(1 << power) for power in range(11))


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's gauges and counters (since start), as they were when the message was sent."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    prompt_tokens: int = 0
    """Prompt rows computed (recomputation included, cached ones not)."""
    generated_tokens: int = 0
    row_bytes: int = 0
    """Host memory held by prompt embeddings of unfinished requests, bytes."""
    captured_steps: int = 0
    """Of `steps`, those whose forward was a captured graph."""
    step_seconds: HistogramCounts = HistogramCounts()
    """Over `STEP_SECONDS_BOUNDS`: the device's time for a step."""
    step_rows: HistogramCounts = HistogramCounts()
    """Over `STEP_ROWS_BOUNDS`."""
    step_sequences: HistogramCounts = HistogramCounts()
    """Over `STEP_SEQUENCES_BOUNDS`."""
    waiting_rows: int = 0
    """Known rows of the choices that wait for a slot."""
    stored_embeddings: int = 0
    stored_bytes: int = 0
    """Host memory held by stored embeddings, those included that were deleted and are still in use."""
    blocks_cached: int = 0
    """Of those that are not in use: those that hold a cached prefix."""


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """The model is not there yet. Sent again at each stage."""

    stage: str


class Sharing(msgspec.Struct, frozen=True, array_like=True, tag="sharing"):
    """The runner reads this worker's `SharedRows`. (Not where they are in different containers, say.)"""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    model: ModelInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Loading failed or the engine died; the runner exits right after. `message` is for the operator's log only."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """The engine thread went round its loop. Sent at least twice a second while it does."""

    stats: Stats


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request is queued. Its first tokens may overtake this message."""

    request: int


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The request will never run; nothing else is sent about it."""

    request: int
    reason: RejectReason
    message: str
    retry_after: float = 0.0
    """Seconds until the same request may be taken, where that is known."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the model's own distribution before temperature and penalties) at one
    position."""

    token: int
    logprob: float
    rank: int
    """1 is the most probable token."""
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Prompt positions start, start + 1, …; None where the row is an embedding without a hint. Every position from 1 on
    is sent exactly once, in order."""

    request: int
    start: int
    entries: tuple[TokenLogprobs | None, ...]


class HiddenRows(msgspec.Struct, frozen=True, array_like=True):
    """Last hidden states of one choice at positions start, start + 1, … (see `SamplingParams.return_hidden_states`)."""

    request: int
    choice: int
    start: int
    rows: bytes
    """[n, hidden_size], the model's dtype, C order; for "mean" float32 [1, hidden_size]."""


class TokenRows(msgspec.Struct, frozen=True, array_like=True, tag="token_rows"):
    """A part of the answer to a `LookUp`; the parts come in order."""

    request: int
    rows: bytes
    """[n, hidden_size], the model's dtype, C order."""
    is_last: bool


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A choice was given a slot for the first time."""

    request: int
    choice: int
    cached_tokens: int
    """Prompt rows taken from the prefix cache."""
    queue_seconds: float


class End(msgspec.Struct, frozen=True, array_like=True):
    """The choice's last message. Its last token, if it made one in this step, is in `StepOutput.tokens` too."""

    request: int
    choice: int
    reason: FinishReason
    stop_token: int | None = None
    """The id of `stop_token_ids` that ended it; it is also the last of the choice's tokens."""
    message: str = ""
    """For reason "error" only; fit for a client."""
    fault: Literal["engine", "request"] = "engine"
    """For reason "error" only: whose. The same request would end the same way again, or it need not."""


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything that one step produced for one worker. The first three lists run in parallel, one entry a token."""

    requests: list[int]
    choices: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = []
    """Empty, or parallel to `tokens`."""
    started: list[Started] = []
    prompt_logprobs: list[PromptLogprobs] = []
    ends: list[End] = []
    hidden: list[HiddenRows] = []
    """May come ahead of `started`, in messages of their own where there are many."""


ToStore = PutRows | FindRows | ListRows | DeleteRows
ToRecords = PutRecord | GetRecord | GetTurns | DeleteRecord
ToRunner = Hello | Generate | Abort | AbortAnswer | LookUp | WorkerGone | ToStore | ToRecords
FromRunner = (
    Loading
    | Sharing
    | Ready
    | Failed
    | Heartbeat
    | Accepted
    | Rejected
    | Aborted
    | StepOutput
    | TokenRows
    | StoreAnswer
    | Reply
)

encode = msgspec.msgpack.Encoder().encode
decode_to_runner = msgspec.msgpack.Decoder(ToRunner).decode
decode_from_runner = msgspec.msgpack.Decoder(FromRunner).decode
