"""What workers ask of the store of records, answered. Called by the endpoint's receiving thread."""

from __future__ import annotations

from runner.messages import GetRecord, GetTurns, PutRecord, Reply, ToRecords
from runner.record_store import Data, NotKept, Record, RecordStore, TooLarge

_COPIED_BYTES = 1 << 16
"""A frame that came in is kept as it is only from this size on: small ones share memory with what came beside them."""


def answer(store: RecordStore, message: ToRecords, frames: list[memoryview]) -> tuple[Reply, list[Data]]:
    """The reply, and the frames behind it. `frames`: those behind `message`."""
    number, owner = message.request, message.owner
    found: list[Data] = []
    try:
        if isinstance(message, PutRecord):
            if len(frames) not in (2, 3) or not message.id:
                return Reply(number, "invalid"), []
            body, turns, *will = map(_kept, frames)
            record = Record(body, turns, message.previous, will[0] if will else b"", message.worker)
            store.put(owner, message.id, record, replaces=message.replaces)
        elif isinstance(message, GetRecord):
            found = [store.get(owner, message.id).body]
            if len(found[0]) > message.max_bytes:
                return Reply(number, "too_large", len(found[0])), []
        elif isinstance(message, GetTurns):
            found = store.turns(owner, message.id, message.max_bytes)
        else:
            store.delete(owner, message.id)
    except NotKept:
        return Reply(number, "not_found"), []
    except TooLarge as error:
        return Reply(number, "too_large", error.size), []
    return Reply(number), found


def _kept(frame: memoryview) -> Data:
    return frame if frame.nbytes >= _COPIED_BYTES else bytes(frame)
