"""A page on its way between warm and cold: what placement begins and a lane carries."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.sessions import Session
from tierd.types import CodecId, PageKey, Place, Tier


def pool_key(placed: tuple[Session, Place]) -> tuple[int, Tier, CodecId]:
    """Return what places of one pool, of a session, have in common."""
    session, place = placed
    return session.number, place.tier, place.codec


@dataclass(slots=True, eq=False)
class Move:
    """A page on its way from `source` to `destination`, the other of warm and cold.

    `warm` is the warm slot's memory (slot_bytes, writable), at `warm_address`: what a spill
    reads and a promotion fills. `digest` is the index's. Both slots are held until
    `finish_moves` or `abort_move`, whatever becomes of the page: `orphaned`.
    `keeps_source`: the copy becomes the page's backing. `recorded`: the ledger has it.
    """

    key: PageKey
    session: Session
    source: Place
    destination: Place
    digest: bytes
    warm: memoryview
    warm_address: int
    slot_bytes: int
    keeps_source: bool = False
    recorded: bool = False
    orphaned: bool = False
