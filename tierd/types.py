"""The words of tierd as types: tier, page, place, geometry, namespace.

A *block* is `block_tokens` consecutive tokens of a session, all layers; a
*page* is one layer of one block. A page is named by its PageKey and found at
its Place. Everything that must be equal for KV to be exchangeable stands in
the Namespace. What there is one of a page is a named tuple: a frozen dataclass
takes three times as long to make, and to hash.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, fields
from typing import NamedTuple

from tierd.errors import InvalidArgument

FORMAT_VERSION = 1

BLOCK_TOKENS_MIN = 16
BLOCK_TOKENS_DEFAULT = 256
BLOCK_TOKENS_MAX = 4096


class Tier(enum.IntEnum):
    """Where a page is. NONE: not below the hot tier (hot, or not yet made)."""

    NONE = 0
    HOT = 1
    WARM = 2
    COLD = 3

    __hash__ = int.__hash__  # Enum's own is written in Python; these are keys of many dicts


class CodecId(enum.IntEnum):
    """How a page is encoded below the hot tier. Numbers are on disk: never reuse one."""

    NONE = 0
    RAW = 1
    INT8 = 2
    K8V4 = 3
    INT4 = 4
    FP8 = 5

    __hash__ = int.__hash__


class DType(enum.StrEnum):
    """The model's KV dtype."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FLOAT32 else 2


class SessionState(enum.StrEnum):
    """RUNNING: an engine owns it. SUSPENDED: the daemon keeps it, no engine does."""

    RUNNING = "running"
    IDLE = "idle"
    SUSPENDED = "suspended"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a model's KV: what a page holds. `kv_heads` and `head_dim` per layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    block_tokens: int = BLOCK_TOKENS_DEFAULT

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 1 <= value <= 65535:
                raise InvalidArgument(f"geometry: {name} is {value}, must be 1 to 65535")
        tokens = self.block_tokens
        power_of_two = tokens & (tokens - 1) == 0
        if not power_of_two or not BLOCK_TOKENS_MIN <= tokens <= BLOCK_TOKENS_MAX:
            raise InvalidArgument(
                f"geometry: block_tokens is {tokens}, must be a power of two "
                f"from {BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX}"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in the model's dtype (hot tier): K and V, all KV heads."""
        return 2 * self.kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in the model's dtype: all layers."""
        return self.layers * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in the model's dtype."""
        return self.block_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens (the last may be partial)."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that must be equal for KV to be exchangeable.

    `codec` is the base, `codec_layers` its exceptions (canonical, layercodecs.py).
    The digest is taken over a length-delimited encoding of every field by
    name, so that no two field values can run together into the same bytes.
    """

    geometry: Geometry
    weights_digest: str
    codec: CodecId = CodecId.INT8
    revision: str = ""
    adapters: str = ""
    rope: str = ""
    rank_map: str = ""
    tenant_salt: str = ""
    format_version: int = FORMAT_VERSION
    codec_layers: str = ""

    def canonical(self) -> list[tuple[str, str]]:
        """Return every field, geometry's included, as (name, text) in a fixed order.

        `codec_layers` is left out while it is empty: what was written before it
        was a field keeps its digest.
        """
        own = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "geometry"]
        own = [(name, value) for name, value in own if name != "codec_layers" or value]
        shape = [(f"geometry.{f.name}", getattr(self.geometry, f.name)) for f in fields(Geometry)]
        return [(name, _text(value)) for name, value in sorted(own + shape)]

    def differing(self, other: Namespace) -> list[str]:
        """Return the names of the fields in which another namespace differs, in a fixed order."""
        theirs, mine = dict(other.canonical()), dict(self.canonical())
        return [name for name in sorted(mine | theirs) if mine.get(name) != theirs.get(name)]

    def digest(self) -> bytes:
        """Return 16 bytes that name this namespace (xxh3-128)."""
        import xxhash

        hasher = xxhash.xxh3_128()
        for name, text in self.canonical():
            for part in (name.encode(), text.encode()):
                hasher.update(len(part).to_bytes(8, "little"))
                hasher.update(part)
        return hasher.digest()


def digest8(value: str | int) -> str:
    """Return 8 bytes, in hex, that stand for a value in logs."""
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, int) else str(value)


class PageKey(NamedTuple):
    """One layer of one block of one session (`session` is its 8-byte id as an int)."""

    session: int
    layer: int
    block: int


class Place(NamedTuple):
    """Where a published page lies: (slab, slot, generation) of a tier, and its codec."""

    tier: Tier
    codec: CodecId
    slab: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class SlabRecord:
    """One slab: its id, whose pages it holds, and how many slots of which size."""

    slab: int
    namespace_digest: bytes
    slot_bytes: int
    slots: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole slab."""
        return self.slots * self.slot_bytes
