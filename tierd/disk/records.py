"""What the ledger records: rows of pages, sessions, slabs; and their form in the journal.

A record is a msgpack array that begins with its kind. Rows of pages travel as
one packed little-endian array, so that replay is `np.frombuffer`. Token ids
of a long session are cut into parts, the session's own record ends them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from tierd.errors import InvalidArgument, StorageError
from tierd.layercodecs import layer_codecs
from tierd.types import CodecId, DType, Geometry, Namespace, SlabRecord

# One page in the cold tier: which, where, and what its bytes must hash to. 44 bytes.
PAGE_ROW = np.dtype(
    [
        ("session", "<u8"), ("block", "<u4"), ("layer", "<u2"), ("codec", "u1"), ("reserved", "u1"),
        ("slab", "<u4"), ("slot", "<u4"), ("generation", "<u4"), ("digest", "u1", (16,)),
    ]
)  # fmt: skip
Rows = npt.NDArray[np.void]  # of PAGE_ROW
Keys = npt.NDArray[np.uint64]  # block << 16 | layer: a page within its session
Record = list[Any]

LAYER_BITS = 16
NUMBER_MAX = 2**64 - 1
WORD_MAX = 2**32 - 1
DIGEST_BYTES = 16
REASON_CHARS_MAX = 200
STATES = ("running", "parked")
_UNPACK = {"raw": False, "strict_map_key": True, "max_map_len": 0, "max_ext_len": 0}


class Kind(enum.IntEnum):
    """First item of a record. Numbers are on disk: never reuse one."""

    COMMIT = 1  # rows
    DROP_PAGES = 2  # session, keys
    TRUNCATE = 3  # session, first block
    TOKENS = 4  # session, offset, bytes
    SESSION = 5  # session, namespace, state, sealed blocks, bytes of token ids, the last of them
    DROP_SESSION = 6  # session
    SLAB = 7  # slab, namespace digest, slot bytes, slots
    DROP_SLAB = 8  # slab
    QUARANTINE = 9  # slab, slot, reason
    SLAB_LIMIT = 10  # ids below it may be in use


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as the disk knows it. `state` is "running" or "parked".

    `token_ids` (uint32 little endian) and `sealed_blocks` are those of the last
    suspension. A parked one has every page of its sealed blocks.
    """

    number: int
    namespace: Namespace
    state: str
    token_ids: bytes = b""
    sealed_blocks: int = 0

    @property
    def kept(self) -> bool:
        """Whether it was ever suspended: an engine's end takes nothing of that."""
        return bool(self.token_ids) or self.state == "parked"

    @property
    def kept_blocks(self) -> int:
        """How many blocks, from the first, a suspension has kept."""
        return self.sealed_blocks if self.kept else 0


def page_keys(rows: Rows) -> Keys:
    """Return the keys, uint64 [rows]."""
    blocks: Keys = rows["block"].astype(np.uint64)
    keys: Keys = (blocks << np.uint64(LAYER_BITS)) | rows["layer"]
    return keys


def keys_of(pages: Sequence[tuple[int, int]]) -> Keys:
    """Return the keys of (layer, block) pairs, uint64 [pages]."""
    return np.array([block << LAYER_BITS | layer for layer, block in pages], dtype=np.uint64)


def empty_rows() -> Rows:
    """Return no rows, to build on."""
    return np.empty(0, dtype=PAGE_ROW)


def namespace_items(namespace: Namespace) -> Record:
    """Return a namespace as a msgpack array: geometry's fields, then its own, in order.

    `codec_layers`, the last, is left out while it is empty, as before it was a field.
    """
    shape = [_plain(getattr(namespace.geometry, f.name)) for f in fields(Geometry)]
    own = [f.name for f in fields(Namespace) if f.name != "geometry"]
    if not namespace.codec_layers:
        own.remove("codec_layers")
    return [shape, [_plain(getattr(namespace, name)) for name in own]]


def _plain(value: object) -> int | str:
    return int(value) if isinstance(value, int) else str(value)


def namespace_of(items: Any) -> Namespace:
    """Return the namespace of `namespace_items`. Raises StorageError if it is not one."""
    try:
        (layers, kv_heads, head_dim, dtype, block_tokens), own = items
        geometry = Geometry(
            integer(layers, WORD_MAX), integer(kv_heads, WORD_MAX),
            integer(head_dim, WORD_MAX), DType(dtype), integer(block_tokens, WORD_MAX),
        )  # fmt: skip
        weights, codec, revision, adapters, rope, rank_map, salt, version, *later = own
        (codec_layers,) = later or [""]
        namespace = Namespace(
            geometry, text(weights), CodecId(integer(codec, 255)), text(revision),
            text(adapters), text(rope), text(rank_map), text(salt), integer(version, WORD_MAX),
            text(codec_layers),
        )  # fmt: skip
        layer_codecs(namespace)
        return namespace
    except (InvalidArgument, TypeError, ValueError) as error:
        raise StorageError(f"not a namespace of this version: {error}") from None


# -- checks of what comes from the disk ----------------------------------------------


def integer(value: Any, maximum: int) -> int:
    """Return `value` if it is an integer from 0 to `maximum`. Raises StorageError."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise StorageError(f"a record holds {value!r:.40} where a number was")
    return value


def text(value: Any) -> str:
    """Return `value` if it is a text. Raises StorageError."""
    if not isinstance(value, str):
        raise StorageError(f"a record holds {value!r:.40} where a text was")
    return value


def whole_bytes(value: Any, size_bytes: int | None = None) -> bytes:
    """Return `value` if it is bytes, of that length. Raises StorageError."""
    if not isinstance(value, bytes) or (size_bytes is not None and len(value) != size_bytes):
        raise StorageError(f"a record holds {value!r:.40} where bytes were")
    return value


def rows_of(data: Any) -> Rows:
    """Return packed rows as a read-only array, no copy. Raises StorageError."""
    packed = whole_bytes(data)
    if len(packed) % PAGE_ROW.itemsize:
        raise StorageError("a record holds a part of a row")
    return np.frombuffer(packed, dtype=PAGE_ROW)


def keys_from(data: Any) -> Keys:
    """Return packed keys as a read-only array. Raises StorageError."""
    packed = whole_bytes(data)
    if len(packed) % 8:
        raise StorageError("a record holds a part of a key")
    return np.frombuffer(packed, dtype="<u8")


# -- records --------------------------------------------------------------------------


def session_records(record: SessionRecord, part_bytes: int) -> list[Record]:
    """Return the records that put a session, token ids in parts of `part_bytes`."""
    tokens = record.token_ids
    whole = len(tokens) // part_bytes * part_bytes
    parts: list[Record] = [
        [Kind.TOKENS, record.number, offset, tokens[offset : offset + part_bytes]]
        for offset in range(0, whole, part_bytes)
    ]
    last = [*session_items(record)[:-1], len(tokens), tokens[whole:]]
    return [*parts, [Kind.SESSION, *last]]


def session_items(record: SessionRecord) -> Record:
    """Return a session as a msgpack array, all token ids in its last item."""
    namespace = namespace_items(record.namespace)
    return [record.number, namespace, record.state, record.sealed_blocks, record.token_ids]


def session_of(items: Any) -> SessionRecord:
    """Return the session of `session_items`. Raises StorageError."""
    if not isinstance(items, list) or len(items) != 5:
        raise StorageError("a session's record has another length")
    number, namespace, state, sealed_blocks, token_ids = items
    if state not in STATES:
        raise StorageError(f"a session's record has state {state!r:.40}")
    return SessionRecord(
        integer(number, NUMBER_MAX), namespace_of(namespace), state, whole_bytes(token_ids),
        integer(sealed_blocks, WORD_MAX),
    )  # fmt: skip


def commit_records(rows: Rows, part_bytes: int) -> list[Record]:
    """Return the records that put rows, in parts of `part_bytes`."""
    most = part_bytes // PAGE_ROW.itemsize
    parts = range(0, len(rows), most)
    return [[Kind.COMMIT, rows[first : first + most].tobytes()] for first in parts]


def drop_records(session: int, keys: Keys, part_bytes: int) -> list[Record]:
    """Return the records that forget pages, in parts of `part_bytes`."""
    most = part_bytes // 8
    parts = range(0, len(keys), most)
    return [[Kind.DROP_PAGES, session, keys[first : first + most].tobytes()] for first in parts]


def slab_items(record: SlabRecord) -> Record:
    """Return a slab as a msgpack array."""
    return [record.slab, record.namespace_digest, record.slot_bytes, record.slots]


def slab_of(items: Any) -> SlabRecord:
    """Return the slab of `slab_items`. Raises StorageError."""
    if not isinstance(items, list) or len(items) != 4:
        raise StorageError("a slab's record has another length")
    slab, digest, slot_bytes, slots = items
    return SlabRecord(
        integer(slab, WORD_MAX), whole_bytes(digest, DIGEST_BYTES), integer(slot_bytes, NUMBER_MAX),
        integer(slots, WORD_MAX),
    )  # fmt: skip


# Items of each kind, the kind included.
LENGTHS = {
    Kind.COMMIT: 2, Kind.DROP_PAGES: 3, Kind.TRUNCATE: 3, Kind.TOKENS: 4, Kind.SESSION: 7,
    Kind.DROP_SESSION: 2, Kind.SLAB: 5, Kind.DROP_SLAB: 2, Kind.QUARANTINE: 4, Kind.SLAB_LIMIT: 2,
}  # fmt: skip


def pack_records(records: Sequence[Record]) -> bytes:
    """Return records as the payload of a frame."""
    packed: bytes = msgpack.packb(records, use_bin_type=True)
    return packed


def unpack_records(payload: bytes) -> Iterator[Record]:
    """Yield a frame's records, each of a known kind and length. Raises StorageError."""
    try:
        records = msgpack.unpackb(payload, **_UNPACK)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise StorageError(f"a frame's payload is not msgpack: {error}") from None
    if not isinstance(records, list):
        raise StorageError("a frame's payload is not an array")
    for record in records:
        if not isinstance(record, list) or not record or type(record[0]) is not int:
            raise StorageError("a frame's payload holds something that is no record")
        if record[0] not in LENGTHS or len(record) != LENGTHS[Kind(record[0])]:
            raise StorageError(f"a record of kind {record[0]} and length {len(record)}")
        for number in record[1:2]:
            if record[0] != Kind.COMMIT:
                integer(number, NUMBER_MAX)
        yield record


def record_bytes(record: Record) -> int:
    """Return about how many bytes a record takes in a frame: its variable part and 64."""
    return 64 + sum(len(item) for item in record if isinstance(item, bytes | str))


def pack_payloads(records: Sequence[Record], payload_bytes: int) -> list[bytes]:
    """Return records as payloads of at most `payload_bytes`, in order, neighbouring rows joined."""
    payloads: list[bytes] = []
    batch: list[Record] = []
    batch_bytes = 0
    for record in join_rows(records, payload_bytes // 2):
        size_bytes = record_bytes(record)
        if batch and batch_bytes + size_bytes > payload_bytes:
            payloads.append(pack_records(batch))
            batch, batch_bytes = [], 0
        batch.append(record)
        batch_bytes += size_bytes
    return [*payloads, pack_records(batch)]


def join_rows(records: Sequence[Record], most_bytes: int) -> Iterator[Record]:
    """Yield records, runs of commits as commits of at most `most_bytes` of rows."""
    run: list[bytes] = []
    run_bytes = 0
    for record in [*records, None]:
        rows = record[1] if record is not None and record[0] == Kind.COMMIT else b""
        if run and (not rows or run_bytes + len(rows) > most_bytes):
            yield [Kind.COMMIT, b"".join(run)]
            run, run_bytes = [], 0
        if rows:
            run.append(rows)
            run_bytes += len(rows)
        elif record is not None:
            yield record
