"""A session as its engine holds it: demotions, promotion, truncation, suspension, hand-over.

Invariants:
  a handle is one thread's at a time
  `table` is the session's page table in the daemon that `client` is connected to
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierd.errors import (
    DaemonUnavailable,
    InvalidArgument,
    LayoutMismatch,
    NotFound,
    StaleGeneration,
)
from tierd.memory.pagetable import PageTableReader
from tierd.rpc import wire
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.types import CodecId, Namespace

if TYPE_CHECKING:
    from tierd.client import Client

# 64 MiB/s is the slowest memory we promise for: 16 MiB of token ids and 64 MiB of headers.
SUSPEND_SECONDS = 10.0
SLOWEST_BYTES_PER_SECOND = 64 << 20  # the slowest disk that the daemon promises for
SUSPEND_SECONDS_MAX = 600.0
ADOPT_SECONDS = 60.0  # 64 GiB of warm pages hashed at 1 GiB/s


@dataclass(frozen=True, slots=True, eq=False)
class Demotion:
    """Slots lent for `blocks`. Arrays [blocks, layers]: codec uint8, the rest uint32.

    Ends in `SessionHandle.commit` or `.abort`. `cold`: they are in slabs of the cold tier, and
    each is to be written whole, header first, under a lock (tierd/disk/slotlocks.py).
    """

    reservation: int
    blocks: list[int]
    codec: npt.NDArray[np.uint8]
    slab: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint32]
    cold: bool = False


class SessionHandle:
    """A session that this client owns. Used by one thread at a time.

    `id`: 16 hex digits; `number`: the same as an int, as in headers and page keys.
    `token_ids`, `sealed_blocks`: of the last suspension; empty for a new session.
    """

    def __init__(
        self,
        client: Client,
        number: int,
        namespace: Namespace,
        table_fd: int,
        token_ids: npt.NDArray[np.uint32],
        sealed_blocks: int,
    ) -> None:
        self._client = client
        self.number = number
        self.namespace = namespace
        self._table_fd = table_fd  # kept, to be handed to the next daemon
        self.table = PageTableReader(table_fd)
        self.token_ids = token_ids
        self.sealed_blocks = sealed_blocks
        self.refusal = ""  # why the newest daemon did not take the session back
        self._open = True

    @property
    def id(self) -> str:
        """The session's id, 16 hex digits."""
        return wire.session_id(self.number)

    @property
    def store_uuid(self) -> bytes:
        """What the headers of this store's slots carry."""
        return self._client.store_uuid

    def plan_demotion(
        self,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codecs: Sequence[CodecId] | None = None,
        include_first: bool = False,
        writes_cold: bool = False,
        deadline_seconds: float | None = None,
    ) -> Demotion:
        """Borrow warm slots for up to `need_blocks` of `hot_blocks`, at least one block.

        `writes_cold`: cold ones will do where warm is full; a daemon that knows of no such
        loans lends warm ones.

        Call it outside a step. `codecs`: a codec a layer, each the namespace's or a
        better one (layercodecs.py); None: the namespace's. `deadline_seconds` None: 10 s, and
        as long as a daemon that was started again holds slots for others. Raises TierFull
        when no room came by the deadline, BudgetTooSmall when none ever can, InvalidArgument,
        DaemonUnavailable.
        """
        request = wire.request(
            pb.PlanDemotionRequest,
            session=self.number,
            hot_blocks=hot_blocks,
            need_blocks=need_blocks,
            codecs=wire.codecs_to_wire(codecs),
            include_first=include_first,
            writes_cold=writes_cold,
        )
        seconds = self._client.room_seconds if deadline_seconds is None else deadline_seconds
        reply = self._client.call(self._client.placement.PlanDemotion, request, seconds)
        blocks = list(reply.blocks)
        return Demotion(
            reservation=reply.reservation,
            blocks=blocks,
            codec=wire.codec_column(reply.codecs, len(blocks)),
            slab=wire.u32_column(reply.slabs, len(blocks)),
            slot=wire.u32_column(reply.slots, len(blocks)),
            generation=wire.u32_column(reply.generations, len(blocks)),
            cold=reply.cold,
        )

    def commit(
        self,
        demotion: Demotion,
        digests: npt.NDArray[np.uint8],
        device_digests: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Publish a demotion's pages; digests uint8 [blocks, layers, 16] of their payloads.

        device_digests: uint64 [blocks, layers] (tierd/codec/devicedigest.py); without them a GPU
        cannot check these pages itself. Raises StaleGeneration if the demotion was revoked: the
        pages are not kept.
        """
        expected = (*demotion.slab.shape, 16)
        if digests.shape != expected or digests.dtype != np.uint8:
            raise InvalidArgument(f"digests: uint8 {expected} expected, not {digests.shape}")
        device = b""
        if device_digests is not None:
            if device_digests.shape != expected[:2] or device_digests.dtype != np.uint64:
                raise InvalidArgument(f"device digests: uint64 {expected[:2]} expected")
            device = device_digests.astype("<u8").tobytes()
        request = pb.CommitRequest(
            reservation=demotion.reservation, digests=digests.tobytes(), device_digests=device
        )
        self._client.call(self._client.placement.Commit, request)

    def abort(self, demotion: Demotion) -> None:
        """Give a demotion's slots back; they are written no more. Raises StaleGeneration."""
        request = pb.AbortRequest(reservation=demotion.reservation)
        self._client.call(self._client.placement.Abort, request)

    def promote(self, blocks: Sequence[int], *, deadline_seconds: float = 10.0) -> int:
        """Bring these blocks' cold pages to warm; return how many of their pages are warm then.

        Fewer than all is a result: there was no room, or no time.
        """
        request = wire.request(pb.PromoteRequest, session=self.number, blocks=blocks)
        reply = self._client.call(self._client.placement.Promote, request, deadline_seconds)
        return int(reply.warm_pages)

    def truncate(self, first_block: int, *, damaged_layer: int | None = None) -> None:
        """Drop every page of blocks >= first_block.

        `damaged_layer`: that layer's page of `first_block` was found damaged.
        """
        request = wire.request(
            pb.TruncateRequest,
            session=self.number,
            first_block=first_block,
            damaged_layer=damaged_layer,
        )
        self._client.call(self._client.sessions_stub.Truncate, request)

    def suspend(
        self,
        token_ids: npt.NDArray[np.uint32],
        sealed_blocks: int,
        *,
        wait_seconds: float = SUSPEND_SECONDS,
    ) -> None:
        """Leave the session to the daemon: token ids uint32 [tokens], and its sealed blocks.

        Every page of these blocks must be committed: PageMiss names one that
        is not. Where the daemon's cold tier outlives it, this returns when all of
        it is on disk; TierFull and StorageError leave the session with this client.
        `wait_seconds`: how long a daemon may stand still, beyond the time of writing.
        The handle is closed after this.
        """
        size_bytes = sealed_blocks * self.namespace.geometry.block_bytes
        wait_seconds = max(wait_seconds, SUSPEND_SECONDS)
        seconds = min(wait_seconds + size_bytes / SLOWEST_BYTES_PER_SECOND, SUSPEND_SECONDS_MAX)
        request = wire.request(
            pb.SuspendRequest,
            session=self.number,
            token_ids=wire.token_ids_to_wire(token_ids),
            sealed_blocks=sealed_blocks,
        )
        self._client.call(self._client.sessions_stub.Suspend, request, seconds)
        self._end()

    def close(self, *, discard: bool = False) -> None:
        """End the session, if this client still owns it. Idempotent.

        It is dropped with all it holds; one that was resumed stays as it was last
        suspended, unless `discard`. A daemon that is gone, or has closed the session
        already, is no error: there is nothing left to free.
        """
        if not self._open:
            return
        try:
            self._close(discard=discard)
        except (DaemonUnavailable, NotFound):
            pass
        finally:
            self._end()

    def discard(self) -> None:
        """End the session for good, with what was kept of it: no restart brings it back.

        Raises StorageError, DaemonUnavailable: it may be there still, as the message says, and
        the handle is open.
        """
        with contextlib.suppress(NotFound):
            self._close(discard=True)
        self._end()

    def _close(self, *, discard: bool) -> None:
        request = pb.CloseRequest(session=self.number, owned=True, discard=discard)
        self._client.call(self._client.sessions_stub.Close, request)

    def hand_back(self) -> int:
        """After `client.reconnect`: give the new daemon this session's pages; return how many.

        Its page table is then a new one. A daemon that cannot take the session (it is
        of another store, or came too late) opens a new one, and 0 is returned: what was
        below the hot tier is to be recomputed, and `refusal` says why.
        Raises DaemonUnavailable, TierFull.
        """
        max_tokens = self.table.max_blocks * self.namespace.geometry.block_tokens
        pages, self.refusal = 0, ""
        try:
            self._client.offer(self._table_fd, self.number, self.table, self.namespace.digest())
            request = wire.request(
                pb.AdoptRequest,
                session=self.number,
                namespace=wire.namespace_to_wire(self.namespace),
                max_tokens=max_tokens,
            )
            reply = self._client.call(self._client.sessions_stub.Adopt, request, ADOPT_SECONDS)
            pages = reply.warm_pages + reply.cold_pages
        except (StaleGeneration, LayoutMismatch, InvalidArgument, NotFound) as error:
            self.refusal = str(error)
            self.number = self._client.open_number(self.namespace, max_tokens)
        fd = self._client.table_fd(self.number)
        table = PageTableReader(fd)
        self._close_table()
        self._table_fd, self.table = fd, table
        return pages

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._close_table()

    def _close_table(self) -> None:
        self.table.close()
        os.close(self._table_fd)
