"""The mover: the only loop over the store. Signatures first; bodies follow."""

from __future__ import annotations

from collections.abc import Sequence

from tierd.store import DemotionPlan, Store
from tierd.types import CodecId


class Mover:
    """Makes room, follows hints, expires, reclaims."""

    def __init__(self, store: Store) -> None: ...

    async def run(self) -> None:
        """Work until `stop`. Run it as one task of the daemon; if it ends, the daemon must."""

    async def stop(self) -> None:
        """End `run`, fail every waiter with DaemonUnavailable. Bounded."""

    async def plan_demotion(
        self,
        engine_id: int,
        number: int,
        hot_blocks: Sequence[int],
        need_blocks: int,
        *,
        codec: CodecId | None = None,
        include_first: bool = False,
        deadline_seconds: float = 10.0,
    ) -> DemotionPlan:
        """As Store.plan_demotion, but makes room first. Raises TierFull at the deadline.

        The calling engine must be quiescent (outside an epoch step): room is made
        by retiring slots, and those wait for every engine's epoch.
        """
        raise NotImplementedError

    async def promote(
        self, engine_id: int, number: int, blocks: Sequence[int], *, deadline_seconds: float = 10.0
    ) -> int:
        """Bring blocks' cold pages to warm; return how many pages of them are warm then."""
        raise NotImplementedError
