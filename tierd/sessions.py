"""What the store remembers of a session, and the one line on how its life goes.

    open → RUNNING ⇄ IDLE → suspend → SUSPENDED → resume → RUNNING … → close

Invariants:
  a session has a page table exactly while an engine owns it
  a suspended session has its token ids, and blocks 0 to sealed_blocks - 1 of them
  have every page; nothing of a later block is kept
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.index import SessionIndex
from tierd.memory.pagetable import PageTableWriter
from tierd.types import Namespace, SessionState
from tierd.units import round_up

# 8M tokens at 16 tokens a block and 128 layers is a 1 GiB page table: refuse beyond.
PAGE_TABLE_BYTES_MAX = 1 << 30
SESSIONS_MAX = 1024


@dataclass(slots=True, eq=False)
class Session:
    """One growing token sequence. `number` is its 8-byte id as an int, `id` the same in hex.

    `token_ids` are uint32 little endian, kept while suspended. `last_used_seconds`
    is on the store's clock.
    """

    number: int
    namespace: Namespace
    namespace_digest: bytes
    max_blocks: int
    engine_id: int | None
    state: SessionState
    last_used_seconds: float
    index: SessionIndex
    table: PageTableWriter | None = None
    token_ids: bytes = b""
    sealed_blocks: int = 0
    reservations: set[int] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The session's name for people and for the wire: 16 hex digits."""
        return f"{self.number:016x}"


def table_bytes(layers: int, max_blocks: int) -> int:
    """Return the bytes of a page table of this shape."""
    return round_up(4096 + 16 * layers * max_blocks, 4096)
