"""What the steps of a session did, counted from where a job or a benchmark says."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.types import Tier
from tierd_engine.attention.plan import StepPlan


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

    def add_step(self, plan: StepPlan, rpcs: int, waited_seconds: float) -> None:
        """Count a step that attended as `plan` says. `waited_seconds`: for cold pages, ever."""
        self.pages[Tier.HOT] += len(plan.layers) * len(plan.hot_blocks)
        self.pages[Tier.WARM] += plan.warm_pages
        self.pages[Tier.COLD] += plan.cold_pages
        self.step_rpcs += rpcs
        self.cold_wait_seconds = waited_seconds - self.cold_wait_before
        self.steps += 1
