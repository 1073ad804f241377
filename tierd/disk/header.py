"""Slot header: 4 KiB that say which page a slot holds, and what its bytes must hash to.

    offset  field
    0       magic "TIERDSLT", u32 version, u32 reserved
    16      store uuid (16)
    32      u32 slab, u32 slot, u32 generation, u8 codec, u8 dtype, u16 reserved
    48      u64 session, u32 layer, u32 block
    64      namespace digest (16)
    80      u64 logical bytes, u64 stored bytes
    96      payload digest, xxh3-128 (16)
    112     version 2: u64 device digest (tierd/codec/devicedigest.py); version 1: zeros
    120     zeros to 4088
    4088    u64 xxh3-64 of bytes 0 to 4088

The checksum covers the padding too, so any flipped bit of the 4 KiB shows.

Version 2 is a page whose engine gave a device digest too, so that a GPU can check bytes that
never pass a CPU; without one the header is version 1, as it always was. Both are read: the number
says which fields there are. A tierd that knows version 1 alone refuses the other, as damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import xxhash

from tierd.errors import PageDamaged
from tierd.types import CodecId, DType
from tierd.units import SECTOR_BYTES

HEADER_BYTES = SECTOR_BYTES
_MAGIC = b"TIERDSLT"
VERSION, VERSION_WITH_DEVICE_DIGEST = 1, 2
_FIELDS = struct.Struct("<8sII16sIIIBBHQII16sQQ16sQ")
_START = struct.Struct("<8sI")
_DEVICE_DIGEST = struct.Struct("<Q")
CHECKSUM_OFFSET = HEADER_BYTES - 8
VERSION_OFFSET = 8
DIGEST_OFFSET = 96
DEVICE_DIGEST_OFFSET = 112
_PIECE_BYTES = 64 << 10
_PADDING = bytes(CHECKSUM_OFFSET - _FIELDS.size)
_DTYPES = {DType.FLOAT32: 1, DType.BFLOAT16: 2, DType.FLOAT16: 3}
_CODECS = frozenset(int(codec) for codec in CodecId if codec is not CodecId.NONE)
_DTYPE_OF = {number: dtype for dtype, number in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot's header says. Both digests are over `stored_bytes` bytes.

    `device_digest`: of 64 bits, or None where the page's engine gave none.
    """

    store_uuid: bytes
    slab: int
    slot: int
    generation: int
    codec: CodecId
    dtype: DType
    session: int
    layer: int
    block: int
    namespace_digest: bytes
    logical_bytes: int
    stored_bytes: int
    payload_digest: bytes
    device_digest: int | None = None

    def pack(self) -> bytes:
        """Return the 4 KiB."""
        return self.pack_at(self.slab, self.slot, self.generation)

    def pack_at(self, slab: int, slot: int, generation: int) -> bytes:
        """Return the 4 KiB of this page's header in another slot."""
        version = VERSION if self.device_digest is None else VERSION_WITH_DEVICE_DIGEST
        body = (
            _FIELDS.pack(
                _MAGIC, version, 0, self.store_uuid, slab, slot, generation,
                self.codec, _DTYPES[self.dtype], 0, self.session, self.layer, self.block,
                self.namespace_digest, self.logical_bytes, self.stored_bytes, self.payload_digest,
                self.device_digest or 0,
            )
            + _PADDING
        )  # fmt: skip
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    def pack_into(self, buffer: memoryview) -> None:
        """Write the 4 KiB to the start of `buffer`."""
        buffer[:HEADER_BYTES] = self.pack()

    @classmethod
    def unpack(cls, buffer: memoryview | bytes) -> SlotHeader:
        """Return the header at the start of `buffer`. Raises PageDamaged on any wrong bit."""
        view = memoryview(buffer)[:HEADER_BYTES]
        if len(view) < HEADER_BYTES:
            raise _damaged("the header is cut short")
        stored = int.from_bytes(view[CHECKSUM_OFFSET:], "little")
        if xxhash.xxh3_64_intdigest(view[:CHECKSUM_OFFSET]) != stored:
            raise _damaged("the header's checksum does not match")
        (
            magic, version, zero, store_uuid, slab, slot, generation, codec, dtype, zero2, session,
            layer, block, namespace_digest, logical_bytes, stored_bytes, payload_digest,
            device_digest,
        ) = _FIELDS.unpack_from(view)  # fmt: skip
        if magic != _MAGIC or version not in (VERSION, VERSION_WITH_DEVICE_DIGEST):
            raise _damaged(f"not a slot header of version 1 to {VERSION_WITH_DEVICE_DIGEST}")
        has_device_digest = version == VERSION_WITH_DEVICE_DIGEST
        if device_digest and not has_device_digest:
            raise _damaged("the header's reserved bytes are not zero")
        if zero or zero2 or view[_FIELDS.size : CHECKSUM_OFFSET].tobytes() != _PADDING:
            raise _damaged("the header's reserved bytes are not zero")
        if dtype not in _DTYPE_OF or codec not in _CODECS:
            raise _damaged(f"unknown codec {codec} or dtype {dtype}")
        return cls(
            store_uuid, slab, slot, generation, CodecId(codec), _DTYPE_OF[dtype], session, layer,
            block, namespace_digest, logical_bytes, stored_bytes, payload_digest,
            device_digest if has_device_digest else None,
        )  # fmt: skip


def page_digest(slot: memoryview, stored_bytes: int) -> bytes:
    """Return the xxh3-128 of a slot's payload, without giving the interpreter's lock up.

    xxhash lets it go for more than 64 KiB. A page takes it 5 to 25 us, and a thread that then
    waits behind others for the lock loses more than they win meanwhile: over eight lanes and a
    disk of 3.5 GB/s, pages of 108 KiB were spilled at 2.7 GB/s so, and are at 3.2 in pieces.
    """
    end = HEADER_BYTES + stored_bytes
    digest = xxhash.xxh3_128()
    for start in range(HEADER_BYTES, end, _PIECE_BYTES):
        digest.update(slot[start : min(start + _PIECE_BYTES, end)])
    return digest.digest()


_IDENTITY = (
    "store_uuid", "namespace_digest", "session", "layer", "block", "slab", "slot", "generation",
    "codec", "dtype", "stored_bytes",
)  # fmt: skip


def verify_slot(buffer: memoryview, expected: SlotHeader) -> SlotHeader:
    """Check a whole slot: header, identity, and the payload against its digest.

    Returns the slot's header. `expected.payload_digest` b"" means that the reader does not know
    it (an engine reads places, not digests); its device digest nobody knows but the slot.
    Raises PageDamaged with the reason.
    """
    found = device_digest_in(buffer)
    likely = expected if found is None else replace(expected, device_digest=found)
    if (
        bytes(buffer[:HEADER_BYTES]) == likely.pack()
        and page_digest(buffer, expected.stored_bytes) == expected.payload_digest
    ):
        return likely  # nearly always; what follows is slower, and finds the reason
    header = verify_header(buffer, expected)
    if page_digest(buffer, header.stored_bytes) != header.payload_digest:
        raise _damaged_page(expected, "the bytes do not match their digest")
    return header


def verify_header(buffer: memoryview, expected: SlotHeader) -> SlotHeader:
    """Check a slot's first 4 KiB alone, as `verify_slot` does; return what they say.

    For a payload that is elsewhere: its own check, by either digest, is the caller's.
    """
    try:
        header = SlotHeader.unpack(buffer)
    except PageDamaged as error:
        raise _damaged_page(expected, str(error)) from None
    for name in _IDENTITY:
        if getattr(header, name) != getattr(expected, name):
            raise _damaged_page(expected, f"the slot holds another page ({name} differs)")
    if expected.payload_digest and header.payload_digest != expected.payload_digest:
        raise _damaged_page(expected, "the slot holds an older write of this page")
    return header


class SlotCheck:
    """`verify_slot` for a slot that is read again and again, its digest not known.

    Called with the slot it raises PageDamaged. What does not change from read to read is made
    once: `starts` are the two beginnings, of DIGEST_OFFSET bytes, that its header may have.
    """

    __slots__ = ("_expected", "starts", "stored_bytes")

    def __init__(self, expected: SlotHeader) -> None:
        with_device_digest = replace(expected, device_digest=0)
        self.starts = tuple(
            header.pack()[:DIGEST_OFFSET] for header in (expected, with_device_digest)
        )
        self.stored_bytes = expected.stored_bytes
        self._expected = expected

    def __call__(self, buffer: memoryview) -> None:
        header = buffer[:HEADER_BYTES].tobytes()
        checksum = xxhash.xxh3_64_intdigest(memoryview(header)[:CHECKSUM_OFFSET])
        digest = header[DIGEST_OFFSET:DEVICE_DIGEST_OFFSET]
        if not (
            header.startswith(self.starts)
            and header.endswith(checksum.to_bytes(8, "little"))
            and page_digest(buffer, self.stored_bytes) == digest
        ):
            verify_slot(buffer, self._expected)  # slower, and finds the reason


def device_digest_in(buffer: memoryview | bytes) -> int | None:
    """Return the device digest that the start of a slot names, unchecked; None without one."""
    if len(buffer) < HEADER_BYTES:
        return None
    if _START.unpack_from(buffer) != (_MAGIC, VERSION_WITH_DEVICE_DIGEST):
        return None
    digest: int = _DEVICE_DIGEST.unpack_from(buffer, DEVICE_DIGEST_OFFSET)[0]
    return digest


def with_device_digest(packed: bytes, digest: int) -> bytes:
    """Return a packed header as it is with this device digest."""
    header = bytearray(packed)
    _START.pack_into(header, 0, _MAGIC, VERSION_WITH_DEVICE_DIGEST)
    _DEVICE_DIGEST.pack_into(header, DEVICE_DIGEST_OFFSET, digest)
    checksum = xxhash.xxh3_64_intdigest(memoryview(header)[:CHECKSUM_OFFSET])
    header[CHECKSUM_OFFSET:] = checksum.to_bytes(8, "little")
    return bytes(header)


def _damaged_page(expected: SlotHeader, reason: str) -> PageDamaged:
    layer, block = expected.layer, expected.block
    return PageDamaged(f"layer {layer} block {block}: {reason}", layer=layer, block=block)


def _damaged(reason: str) -> PageDamaged:
    return PageDamaged(reason, layer=-1, block=-1)
