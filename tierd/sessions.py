"""Sessions: one growing token sequence each, and the engine that owns it.

    open → RUNNING ⇄ IDLE → suspend → SUSPENDED → resume → RUNNING …     close from any

Invariants:
  a session has a page table exactly while an engine owns it, and only RUNNING
  and IDLE ones do
  a suspended session has its token ids, every page of blocks 0 to
  sealed_blocks - 1, and no other page; while it is dormant the ledger alone
  knows them
  what a suspension kept stands while an engine goes on with the session: it
  ends with a close, and is cut by a truncation, by nothing else; of one that
  found no room on disk, and so was refused, what is in RAM alone ends with the
  daemon, though the engine hands it back to the next one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierd.errors import InvalidArgument, NotFound, PageMiss, TierFull
from tierd.index import SessionIndex
from tierd.layercodecs import layer_codecs
from tierd.memory.pagetable import PageTableWriter
from tierd.types import CodecId, Namespace, PageKey, Place, SessionState, Tier

SESSIONS_MAX = 1024
TOKEN_BYTES = 4  # token ids are uint32
# 4M tokens in blocks of 256 over 128 layers are 2M entries of 16 bytes: 32 MiB. Beyond
# 256 MiB it is a mistake, and 1,024 sessions of that size would be all of a host's memory.
PAGE_TABLE_BYTES_MAX = 256 << 20
PAGE_TABLE_ENTRY_BYTES = 16
NEVER = 2**64 - 1  # beyond any epoch


@dataclass(slots=True, eq=False)
class Session:
    """One session. `number` is its 8-byte id as an int, `id` the same in 16 hex digits.

    `kept`: it was suspended; `token_ids` (uint32 little endian) and `sealed_blocks`
    are those of then. `kept_before`: the same of the suspension before, until the last one has
    ended well; `settled`: all pages of the last one are on disk, and the ledger is told of it, not
    of the one before. `last_used_seconds` is on the store's clock. `page_codecs`: a
    codec a layer, of the newest demotion (its engine may want more than the namespace's).
    `recorded`: the ledger was told of it. `writes_cold`: its engine takes cold slots where warm
    is full, so that no spare room need be made for it.
    """

    number: int
    namespace: Namespace
    namespace_digest: bytes
    index: SessionIndex
    last_used_seconds: float
    state: SessionState = SessionState.SUSPENDED
    engine_id: int | None = None
    table: PageTableWriter | None = None
    max_blocks: int = 0
    token_ids: bytes = b""
    sealed_blocks: int = 0
    kept: bool = False
    kept_before: tuple[bytes, int] | None = None
    settled: bool = False
    dormant: bool = False
    recorded: bool = False
    writes_cold: bool = False
    page_codecs: tuple[CodecId, ...] = ()
    slot_sizes: dict[CodecId, int] = field(default_factory=dict)  # placement's, by codec

    def __post_init__(self) -> None:
        self.page_codecs = self.page_codecs or layer_codecs(self.namespace)

    @property
    def id(self) -> str:
        """The session's name for people and on the wire."""
        return f"{self.number:016x}"

    @property
    def layers(self) -> int:
        """Layers of the session's model: pages in a block."""
        return self.namespace.geometry.layers

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.namespace.geometry.block_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the last suspension, or up to the last block below hot, whichever are more.

        What a running session has beyond them its engine alone knows.
        """
        below = (self.index.blocks_in(tier)[-1:] for tier in (Tier.WARM, Tier.COLD))
        blocks = 1 + max((block for found in below for block in found), default=-1)
        return max(len(self.token_ids) // TOKEN_BYTES, blocks * self.block_tokens)

    def give(self, engine_id: int, max_tokens: int, epoch: int) -> None:
        """Let an engine own the session, in a new page table. Raises InvalidArgument (size)."""
        assert self.table is None, f"session {self.id} has a page table already"
        max_blocks = self.namespace.geometry.blocks_for(max_tokens)
        table_bytes = PAGE_TABLE_ENTRY_BYTES * self.layers * max_blocks
        if max_blocks < max(1, self.sealed_blocks) or table_bytes > PAGE_TABLE_BYTES_MAX:
            raise InvalidArgument(f"max_tokens is {max_tokens}: too few or too many")
        self.table = PageTableWriter(self.number, self.layers, max_blocks)
        self.table.set_epoch(epoch)
        self.index.attach(self.table)
        self.max_blocks = max_blocks
        self.engine_id = engine_id
        self.state = SessionState.RUNNING

    def take_back(self, state: SessionState) -> None:
        """End the engine's ownership: the page table is emptied and closed.

        An engine that still looks (it was taken for dead) sees every slot reclaimed.
        """
        if self.table is not None:
            self.table.set_reclaimed(NEVER)
        self.index.detach()
        if self.table is not None:
            self.table.close()
        self.table = None
        self.engine_id = None
        self.state = state

    def check_suspendable(self, token_ids: bytes, sealed_blocks: int) -> None:
        """Raise InvalidArgument (sizes), or PageMiss naming the first page not below hot."""
        tokens, rest = divmod(len(token_ids), TOKEN_BYTES)
        if rest or tokens > self.max_blocks * self.block_tokens:
            raise InvalidArgument(f"suspend: {len(token_ids)} bytes of token ids do not fit")
        if not 0 <= sealed_blocks * self.block_tokens <= tokens:
            raise InvalidArgument(f"suspend: {sealed_blocks} blocks sealed of {tokens} tokens")
        for block in range(sealed_blocks):
            missing = set(range(self.layers)) - set(self.index.layers_of(block))
            if missing:
                layer = min(missing)
                raise PageMiss(
                    f"suspend: layer {layer} of block {block} is not below hot",
                    layer=layer,
                    block=block,
                )

    def keep(self, token_ids: bytes, sealed_blocks: int) -> None:
        """Note what a suspension keeps."""
        self.token_ids = bytes(token_ids)
        self.sealed_blocks = sealed_blocks
        self.kept = True

    def pages_from(self, first_block: int) -> list[tuple[PageKey, Place]]:
        """Return the pages of blocks >= first_block, block by block."""
        pages: list[tuple[PageKey, Place]] = []
        for block in self.index.blocks_from(first_block):
            for layer in self.index.layers_of(block):
                page = self.index.get(layer, block)
                assert page is not None
                pages.append((PageKey(self.number, layer, block), page.place))
        return pages

    def check_integrity(self) -> None:
        """Raise AssertionError if state, owner, table and pages do not agree."""
        owned = self.state in (SessionState.RUNNING, SessionState.IDLE)
        assert owned == (self.engine_id is not None) == (self.table is not None), (
            f"session {self.id}: {self.state}, engine {self.engine_id}, table {self.table}"
        )
        self.index.check_integrity()
        assert not self.dormant or not len(self.index), f"session {self.id}: dormant, with pages"
        suspended = self.state is SessionState.SUSPENDED
        assert self.kept or not suspended, f"session {self.id}: not kept"
        assert self.kept_before is None or not suspended, f"session {self.id}: kept twice"
        if self.state is SessionState.SUSPENDED and not self.dormant:
            pages = self.sealed_blocks * self.layers
            assert len(self.index) == pages and self.index.holds(range(self.sealed_blocks)), (
                f"session {self.id}: {len(self.index)} pages, {self.sealed_blocks} sealed blocks"
            )


class SessionBook:
    """All sessions by number."""

    def __init__(self, new_number: Callable[[], int]) -> None:
        self._new_number = new_number
        self._sessions: dict[int, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def new(self, namespace: Namespace, now_seconds: float, number: int = 0) -> Session:
        """Return a session that is not yet in the book. Raises TierFull.

        `number` 0: one that is not used.
        """
        if len(self._sessions) >= SESSIONS_MAX:
            raise TierFull(f"{SESSIONS_MAX} sessions are open", retry_after_seconds=1.0)
        number = number or self._new_number()
        while number == 0 or number in self._sessions:
            number = self._new_number()
        index = SessionIndex(namespace.geometry.layers)
        return Session(number, namespace, namespace.digest(), index, now_seconds)

    def add(self, session: Session) -> None:
        """Enter a session."""
        self._sessions[session.number] = session

    def remove(self, session: Session) -> None:
        """Strike a session out."""
        del self._sessions[session.number]

    def find(self, number: int, engine_id: int | None = None) -> Session:
        """Raise NotFound if there is none, or it is not `engine_id`'s."""
        session = self._sessions.get(number)
        if session is None or (engine_id is not None and session.engine_id != engine_id):
            raise NotFound(f"no session {number:016x}")
        return session

    def of_engine(self, engine_id: int) -> list[Session]:
        """Return the sessions that an engine owns."""
        return [session for session in self if session.engine_id == engine_id]
