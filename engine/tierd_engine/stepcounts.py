"""What the steps of a session did, counted from where a job or a benchmark says."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.types import Tier


@dataclass(slots=True)
class StepCounts:
    """What steps did: pages attended by tier, calls made inside steps and to make room."""

    steps: int = 0
    step_rpcs: int = 0
    room_rpcs: int = 0
    cold_wait_seconds: float = 0.0
    cold_wait_before: float = 0.0
    pages: dict[Tier, int] = field(
        default_factory=lambda: {Tier.HOT: 0, Tier.WARM: 0, Tier.COLD: 0}
    )
