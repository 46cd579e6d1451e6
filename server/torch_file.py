"""Reads the zip file that `torch.save(tensor)` writes, without torch and without unpickling. Called by `embeddings`.

The zip's `data.pkl` describes the tensor as a pickle. Unpickling means calling what the pickle names, so nothing here
does: the pickle is walked by an interpreter that knows the opcodes which torch writes for one dense tensor and six
names, and whose only results are strings, integers, booleans, tuples and the records below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from server.file_tensor import BIG_ENDIAN, ITEM_BYTES, UNSUPPORTED_DTYPE, EmbeddingError, FileTensor, RowLimits
from server.stored_zip import read_stored_zip

MAX_PICKLE_BYTES = 4096
"""One tensor takes about 200."""
MAX_MEMO = 256
MAX_STACK = 64

_NOT_ONE_TENSOR = (
    "the torch.save file holds something other than one dense tensor (a list, a dict, a module, a tensor with"
    " attributes): save tensor.detach().contiguous() alone"
)
_SPARSE = "the torch.save file holds a sparse tensor: send it dense (tensor.to_dense())"
_NOT_CONTIGUOUS = (
    "the torch.save file's tensor is not contiguous (a transposed, expanded or column-sliced view):"
    " save tensor.contiguous()"
)
_DAMAGED = "the torch.save file's pickle is damaged"


class _Name(Enum):
    """What the pickle may call, standing for itself: nothing is imported."""

    REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
    REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
    ORDERED_DICT = "collections OrderedDict"


class _Sentinel(Enum):
    MARK = "where a tuple starts on the stack"
    HOOKS = "an empty OrderedDict: torch writes one for a tensor's backward hooks"


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    """The member `data/<key>` holds its bytes."""
    numel: object


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the pickle says of the tensor, not yet checked: any of it may be of any type and size."""

    storage: _Storage
    offset: object
    """In values from the storage's start."""
    size: tuple[object, ...]
    stride: tuple[object, ...]


_NAMES: dict[str, _Name | _StorageType] = {
    **{name.value: name for name in _Name},
    "torch FloatStorage": _StorageType("float32"),
    "torch HalfStorage": _StorageType("float16"),
    "torch BFloat16Storage": _StorageType("bfloat16"),
}


def read_torch(payload: memoryview, limits: RowLimits) -> FileTensor:
    """The file's one tensor, as a view of its storage in `payload`. Raises EmbeddingError."""
    members = read_stored_zip(payload)
    pickles = [name for name in members if name.endswith(b"/data.pkl")]
    if len(pickles) != 1:
        raise EmbeddingError("the zip file was not written by torch.save")
    folder = pickles[0].removesuffix(b"data.pkl")
    # Files of torch before 2.1 have no such record.
    if members.get(folder + b"byteorder", b"little") != b"little":
        raise EmbeddingError(BIG_ENDIAN)
    if len(members[pickles[0]]) > MAX_PICKLE_BYTES:
        raise EmbeddingError(f"the torch.save file's pickle is over {MAX_PICKLE_BYTES} bytes: save one tensor alone")
    tensor = _Walk(bytes(members[pickles[0]])).run()

    rows = limits.num_rows(tensor.size)
    hidden = limits.hidden_size
    # As in torch, the stride of a dimension of size 1 means nothing.
    contiguous = (hidden == 1 or tensor.stride[-1:] == (1,)) and (rows == 1 or tensor.stride[-2:-1] == (hidden,))
    if not contiguous or len(tensor.stride) != len(tensor.size):
        raise EmbeddingError(_NOT_CONTIGUOUS)
    storage = members.get(folder + b"data/" + tensor.storage.key.encode())
    offset, numel = tensor.offset, tensor.storage.numel
    item = ITEM_BYTES[tensor.storage.dtype]
    if storage is None or type(numel) is not int or len(storage) != numel * item:
        raise EmbeddingError("the torch.save file's storage is missing or has another size than its pickle says")
    if type(offset) is not int or not 0 <= offset <= numel - rows * hidden:
        raise EmbeddingError("the torch.save file's tensor lies outside of its storage")
    start = offset * item
    return FileTensor(storage[start : start + rows * hidden * item], rows, tensor.storage.dtype)


class _Walk:
    """One pass over a pickle of at most MAX_PICKLE_BYTES. Every opcode adds at most one item to the stack or the memo,
    items are never compared or printed, so a pickle can cost neither time nor memory beyond its own length."""

    def __init__(self, code: bytes) -> None:
        self._code = code
        self._at = 0
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> _Tensor:
        """The one tensor that the pickle describes. Raises EmbeddingError for anything else."""
        if self._take(2) != b"\x80\x02":  # PROTO 2
            raise EmbeddingError("the torch.save file's pickle must be of protocol 2, torch.save's default")
        while (opcode := self._take(1)) != b".":  # STOP
            self._step(opcode)
            if len(self._stack) > MAX_STACK:
                raise EmbeddingError(_NOT_ONE_TENSOR)
        tensor = self._pop()
        if not isinstance(tensor, _Tensor) or self._stack or self._at != len(self._code):
            raise EmbeddingError(_NOT_ONE_TENSOR)
        return tensor

    def _step(self, opcode: bytes) -> None:
        push = self._stack.append
        match opcode:
            case b"q":  # BINPUT
                self._remember(self._unsigned(1))
            case b"r":  # LONG_BINPUT
                self._remember(self._unsigned(4))
            case b"h":  # BINGET
                push(self._recall(self._unsigned(1)))
            case b"j":  # LONG_BINGET
                push(self._recall(self._unsigned(4)))
            case b"K":  # BININT1
                push(self._unsigned(1))
            case b"M":  # BININT2
                push(self._unsigned(2))
            case b"J":  # BININT
                push(int.from_bytes(self._take(4), "little", signed=True))
            case b"\x8a":  # LONG1
                push(self._long())
            case b"\x88" | b"\x89":  # NEWTRUE, NEWFALSE
                push(opcode == b"\x88")
            case b"X":  # BINUNICODE
                push(self._text(self._take(self._unsigned(4))))
            case b"(":  # MARK
                push(_Sentinel.MARK)
            case b")" | b"\x85" | b"\x86" | b"\x87":  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3
                push(self._tuple(0 if opcode == b")" else opcode[0] - 0x84))
            case b"t":  # TUPLE
                push(self._tuple_from_mark())
            case b"c":  # GLOBAL
                push(self._name())
            case b"Q":  # BINPERSID
                push(self._storage())
            case b"R":  # REDUCE
                push(self._call())
            case _:
                raise EmbeddingError(_NOT_ONE_TENSOR)

    def _take(self, count: int) -> bytes:
        if count > len(self._code) - self._at:
            raise EmbeddingError(_DAMAGED)
        self._at += count
        return self._code[self._at - count : self._at]

    def _unsigned(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _long(self) -> int:
        length = self._unsigned(1)
        if length > 8:
            raise EmbeddingError(_DAMAGED)
        return int.from_bytes(self._take(length), "little", signed=True)

    def _text(self, encoded: bytes) -> str:
        try:
            return encoded.decode()
        except UnicodeDecodeError:
            raise EmbeddingError(_DAMAGED) from None

    def _top(self) -> object:
        if not self._stack or self._stack[-1] is _Sentinel.MARK:
            raise EmbeddingError(_DAMAGED)
        return self._stack[-1]

    def _pop(self) -> object:
        item = self._top()
        self._stack.pop()
        return item

    def _remember(self, index: int) -> None:
        if index >= MAX_MEMO:
            raise EmbeddingError(_NOT_ONE_TENSOR)
        self._memo[index] = self._top()

    def _recall(self, index: int) -> object:
        if index not in self._memo:
            raise EmbeddingError(_DAMAGED)
        return self._memo[index]

    def _tuple(self, length: int) -> tuple[object, ...]:
        return tuple([self._pop() for _ in range(length)][::-1])

    def _tuple_from_mark(self) -> tuple[object, ...]:
        items: list[object] = []
        while self._stack and self._stack[-1] is not _Sentinel.MARK:
            items.append(self._stack.pop())
        if not self._stack:
            raise EmbeddingError(_DAMAGED)
        self._stack.pop()
        return tuple(items[::-1])

    def _name(self) -> _Name | _StorageType:
        lines = []
        for _ in range(2):
            end = self._code.find(b"\n", self._at)
            if end < 0:
                raise EmbeddingError(_DAMAGED)
            lines.append(self._text(self._take(end - self._at)))
            self._take(1)
        name = " ".join(lines)
        if name in _NAMES:
            return _NAMES[name]
        # Not the others' names: what a client's pickle asks for is content.
        if name.startswith("torch._utils _rebuild_sparse"):
            raise EmbeddingError(_SPARSE)
        # _rebuild_tensor_v3 is for dtypes that have no storage type of their own.
        if name.endswith("Storage") or name == "torch._utils _rebuild_tensor_v3":
            raise EmbeddingError(UNSUPPORTED_DTYPE)
        raise EmbeddingError(_NOT_ONE_TENSOR)

    def _storage(self) -> _Storage:
        # The location ("cpu", "cuda:0") is where the client's tensor was; its bytes are the same.
        match self._pop():
            case ("storage", _StorageType(dtype), str(key), str(), numel):
                return _Storage(dtype, key, numel)
        raise EmbeddingError(_NOT_ONE_TENSOR)

    def _call(self) -> _Tensor | _Sentinel:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case _Name.ORDERED_DICT, ():
                return _Sentinel.HOOKS
            # A seventh argument would say that the values are to be negated or conjugated.
            case _Name.REBUILD_TENSOR, (_Storage() as storage, offset, tuple(size), tuple(stride), bool(), hooks):
                if hooks is _Sentinel.HOOKS:
                    return _Tensor(storage, offset, size, stride)
            case _Name.REBUILD_PARAMETER, (_Tensor() as tensor, bool(), _Sentinel.HOOKS):
                return tensor
        raise EmbeddingError(_NOT_ONE_TENSOR)
