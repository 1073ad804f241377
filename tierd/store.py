"""The store: what is kept, where, and who may write it. Signatures first; bodies follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tierd.hints import HintTicket
from tierd.memory.memfd import Mapping
from tierd.sessions import Session
from tierd.types import CodecId, Namespace, PageKey, Place, Tier


class Clock(Protocol):
    """Time as the store sees it."""

    def monotonic(self) -> float:
        """Return seconds that only rise."""
        ...


@dataclass(frozen=True, slots=True)
class DemotionPlan:
    """Warm slots reserved for pages of one session.

    `blocks[i]`'s layer j goes to `places[i][j]`. Digests are committed in that
    order: block by block, layers inside.
    """

    reservation: int
    session: int
    blocks: list[int]
    places: list[list[Place]]


@dataclass(frozen=True, slots=True)
class SlabInfo:
    """One slab as an engine may map it. `fd` belongs to the store: duplicate, never close."""

    slab: int
    tier: Tier
    slot_bytes: int
    slots: int
    fd: int


class Store:
    """Sessions, index, pools, reservations, hints and epochs. See the module docstring."""

    def __init__(
        self,
        *,
        warm: Any,
        cold: Any,
        store_uuid: bytes,
        clock: Clock,
        new_number: Callable[[], int],
    ) -> None: ...

    # -- engines ------------------------------------------------------------------
    def register_engine(self, engine_id: int, pid: int, epoch_page: Mapping) -> None:
        """Let an engine take part in reclamation. The store owns and closes `epoch_page`."""

    def drop_engine(self, engine_id: int) -> None:
        """Forget a dead or departed engine: sessions closed, reservations freed, epoch dropped.

        Suspended sessions stay. Unknown ids are ignored (a death is often seen twice).
        """

    # -- sessions -----------------------------------------------------------------
    def open_session(self, engine_id: int, namespace: Namespace, max_tokens: int) -> Session:
        """Raises NotFound (engine), InvalidArgument (size), TierFull (too many sessions)."""
        raise NotImplementedError

    def resume_session(
        self, engine_id: int, number: int, namespace: Namespace, max_tokens: int
    ) -> Session:
        """Give a suspended session to an engine, with a new page table, all pages published.

        `.token_ids` and `.sealed_blocks` say what it holds. Raises NotFound,
        LayoutMismatch (other namespace), StaleGeneration (not suspended), InvalidArgument.
        """
        raise NotImplementedError

    def suspend_session(
        self, engine_id: int, number: int, token_ids: bytes, sealed_blocks: int
    ) -> None:
        """Keep a session without its engine. Its first `sealed_blocks` blocks must be below hot.

        `token_ids`: uint32 little endian. Raises InvalidArgument, PageMiss, NotFound.
        """

    def close_session(self, number: int, *, engine_id: int | None = None) -> None:
        """Drop a session and all it holds. `engine_id` None: an operator, or its client's death.

        Raises NotFound, also when another engine owns it.
        """

    def truncate(
        self, engine_id: int, number: int, first_block: int, *, damaged_layer: int | None = None
    ) -> int:
        """Drop all pages of blocks >= first_block; return how many. Counts one corrupt page
        (`damaged_layer` of `first_block`) if the engine says that it found it damaged."""
        raise NotImplementedError

    def session(self, number: int, *, engine_id: int | None = None) -> Session:
        """Return a session. Raises NotFound, also when another engine owns it."""
        raise NotImplementedError

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        raise NotImplementedError

    # -- placement ----------------------------------------------------------------
    def plan_demotion(
        self,
        engine_id: int,
        number: int,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codec: CodecId | None = None,
        include_first: bool = False,
    ) -> DemotionPlan:
        """Reserve warm slots for up to `need_blocks` victims out of `hot_blocks`.

        Never returns an empty plan: raises RoomNeeded (a TierFull) when not one
        block fits now, BudgetTooSmall when it never can. Use Mover.plan_demotion,
        which makes room and retries.
        """
        raise NotImplementedError

    def commit(self, engine_id: int, reservation: int, digests: bytes) -> None:
        """Publish a plan's pages. `digests`: 16 bytes per page, in plan order.

        Raises InvalidArgument (length; the reservation stays open), StaleGeneration
        (unknown, used, expired or revoked; the slots are free after it).
        """

    def abort(self, engine_id: int, reservation: int) -> None:
        """Give a plan's slots back: the engine promises not to write them any more. Idempotent."""

    def slab_for(self, engine_id: int, slab: int) -> SlabInfo:
        """Return a slab of a namespace that `engine_id` has a session in. Raises NotFound."""
        raise NotImplementedError

    # -- hints --------------------------------------------------------------------
    def hint(
        self,
        client_id: str,
        number: int,
        *,
        deadline_seconds: float,
        first_token: int = 0,
        last_token: int | None = None,
        confidence: float = 1.0,
        priority: int = 0,
    ) -> HintTicket:
        """Raises NotFound, InvalidArgument (range, or a running session), TierFull (limits)."""
        raise NotImplementedError

    def cancel_hint(self, client_id: str, hint_id: int) -> None:
        """Raises NotFound (unknown, settled, or another client's)."""

    def drop_client(self, client_id: str) -> None:
        """Cancel a departed client's open hints and forget its score."""

    # -- house --------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Return a plain dict of counts and bytes; keys are in the README's table."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError, every term printed, if a page, slot or byte is unaccounted for."""

    def close(self) -> None:
        """Drop everything: sessions, slabs, epochs. Idempotent."""

    def begin_move(self, key: PageKey, to: Tier) -> Any:
        """For the Mover."""
        raise NotImplementedError
