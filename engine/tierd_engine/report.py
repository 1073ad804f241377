"""Report of a job: what stood in which tier, how fast, and what was checked.

The dictionary is a versioned interface: a key keeps its meaning, new ones may
come. `decode.rpc_per_step` counts calls made inside decode steps;
`decode.demotion_rpcs` those made between steps, when a full block went down. For
`decode.recorded_steps` and `decode.steps_as_one_job` see recorded.py and wholestep.py.
`checks.damaged_or_lost_blocks` counts full blocks: of each loss the one that was found
damaged or gone, and all after it, which are computed anew with it.
A daemon that other jobs use too counts and holds for all of them: what is not this
job's alone is null, and the daemon's own figures stand in `daemon`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.codec.layout import page_layout
from tierd.errors import StorageError, StorageFull, TierdError, TierFull
from tierd.layercodecs import CodecChoice
from tierd.types import CodecId, Tier
from tierd_engine.guardreport import guard_section

if TYPE_CHECKING:
    from tierd_engine.fidelity import FidelityReport
    from tierd_engine.generator import Generator
    from tierd_engine.runner import PreparedJob, Timings
    from tierd_engine.session import SessionKV

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier's row: pages held, their bytes, share of all pages, pages read per new token."""

    pages: int
    bytes: int
    share: float
    pages_read_per_token: float


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job did. `sections` is the JSON object without its version."""

    text: str
    sections: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned JSON object."""
        return {"version": REPORT_VERSION, "text": self.text, **self.sections}


class NotKept(TierdError):
    """A job is done, its session not kept as it should be. `report` is the job's.

    `says_what_stays`: the message tells what is left of the session, and where.
    """

    def __init__(self, report: JobReport, error: TierdError, *, resumed: bool) -> None:
        said = str(error)
        self.says_what_stays = isinstance(error, TierFull | StorageError)
        if self.says_what_stays:
            name = report.sections["session"]["id"]
            said += f". Session {name} {_what_stays(error, resumed)}"
        super().__init__(said)
        self.report = report
        report.sections["session"]["kept"] = False
        self.exit_code = error.exit_code


def _what_stays(error: TierdError, resumed: bool) -> str:
    """Say where a session is whose suspension was refused. A full disk may have room again."""
    lacks_space = isinstance(error, TierFull | StorageFull)
    if resumed and lacks_space:
        return "stays as it was kept before this job"
    if resumed:
        return "is as it was before this job"
    in_memory = "is kept in the daemon's memory alone, what of it is not on disk"
    if lacks_space:
        return f"{in_memory}: the daemon keeps it by itself once there is room"
    return f"{in_memory}: it ends with the daemon, unless the disk takes it before"


class NotDropped(NotKept):
    """A job is done, and the session that it was to drop may still be there, as it was kept."""

    def __init__(self, report: JobReport, error: TierdError) -> None:
        TierdError.__init__(self, str(error))
        self.says_what_stays = True
        self.report = report
        report.sections["session"]["kept"] = True
        self.exit_code = error.exit_code


def build_report(
    job: PreparedJob,
    stats: tuple[dict[str, Any], dict[str, Any]],
    generator: Generator,
    timings: Timings,
    new_tokens: int,
    text: str,
    fidelity: FidelityReport | None,
) -> JobReport:
    """Collect the report from the session, the clock, and the daemon's stats before and after."""
    kv = generator.kv
    daemon = stats[1]
    counts = kv.counts
    steps = max(timings.decode_steps, 1)
    sections: dict[str, Any] = {
        "model": job.spec.model,
        "dtype": str(job.dtype),
        "codec": str(CodecChoice(job.codec, job.namespace.codec_layers)),
        "plan": str(job.plan),
        "block_tokens": job.sizes.block_tokens,
        "kv_bytes": job.sizes.kv_bytes,
        "session": {"id": kv.handle.id, "kept": job.spec.keeps},
        "prefill": {
            "tokens": timings.prefill_tokens,
            "context_tokens": job.sizes.context_tokens,
            "seconds": timings.prefill_seconds,
            "tokens_per_second": _rate(timings.prefill_tokens, timings.prefill_seconds),
        },
        "decode": {
            "tokens": new_tokens,
            "steps": timings.decode_steps,
            "seconds": timings.decode_seconds,
            "tokens_per_second": _rate(timings.decode_steps, timings.decode_seconds),
            "rpc_per_step": counts.step_rpcs / steps,
            "demotion_rpcs": counts.room_rpcs,
            "cold_wait_seconds": counts.cold_wait_seconds,
            "recorded_steps": generator.decode_step.recorded_steps,
            "steps_as_one_job": generator.decode_step.whole_steps,
            "not_recorded_because": generator.decode_step.problem,
            "not_one_job_because": generator.decode_step.whole_problem,
        },
        **_tier_sections(job, kv, stats),
        "device": kv.workings.figures(),
        "guard": guard_of(job, kv),
        "checks": {
            "digests_verified": kv.workings.cold_pages_verified,
            "damaged_or_lost_blocks": generator.lost_blocks,
            "recomputed_tokens": generator.recomputed_tokens,
            "raw_fallback_blocks": kv.agent.raw_fallback_blocks,
            "integrity": True,
        },
    }
    if job.shared:
        sections["daemon"] = {
            name: {key: tier[key] for key in ("capacity_bytes", "used_bytes", "peak_bytes")}
            for name, tier in daemon["tiers"].items()
        }
    if fidelity is not None:
        sections["verify"] = _verify_section(sections, fidelity)
    return JobReport(text, sections)


def guard_of(job: PreparedJob, kv: SessionKV) -> dict[str, Any]:
    """Return the quality guard's section, as things are now: a suspension may ask it once more."""
    followed, resumed = not kv.agent.codecs_refused, job.spec.resume is not None
    return guard_section(kv.guard, job.namespace, followed=followed, resumed=resumed)


def _tier_sections(
    job: PreparedJob, kv: SessionKV, stats: tuple[dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    tiers, daemon = _tier_figures(kv), stats[1]
    return {
        "hot": {
            **asdict(tiers[Tier.HOT]),
            "peak_bytes": kv.arena.peak_bytes,
            "budget_bytes": kv.arena.budget_bytes,
            "staging_bytes": (
                kv.executors.staging_bytes
                + kv.workings.cold_writer.total_bytes
                + kv.workings.encoder_bytes
            ),
            "demotions": kv.agent.demoted_blocks * kv.geometry.layers,
            "promoted_hot_blocks": kv.promoted_hot_blocks,
        },
        "warm": {
            **asdict(tiers[Tier.WARM]),
            "budget_bytes": daemon["tiers"]["warm"]["capacity_bytes"],
            "spills": _moved(job, stats, "spills"),
            "peak_bytes": None if job.shared else daemon["tiers"]["warm"]["peak_bytes"],
        },
        "cold": {
            **asdict(tiers[Tier.COLD]),
            "budget_bytes": daemon["tiers"]["cold"]["capacity_bytes"],
            "promotions": _moved(job, stats, "promotions"),
            "written": kv.workings.cold_writer.figures(),
            "device": daemon["tiers"]["cold"].get("device", ""),
            "bytes_read": kv.workings.cold_bytes_read,
        },
    }


def _moved(job: PreparedJob, stats: tuple[dict[str, Any], dict[str, Any]], name: str) -> int | None:
    """Return the pages moved during the job; None if other engines may have caused some."""
    before, after = stats
    if job.shared and max(before["engines"], after["engines"]) > 1:
        return None
    return int(after[name] - before[name])


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _verify_section(sections: dict[str, Any], fidelity: FidelityReport) -> dict[str, Any]:
    own_prefill = _rate(sections["prefill"]["context_tokens"], fidelity.own_prefill_seconds)
    own_decode = _rate(fidelity.tokens - 1, fidelity.own_decode_seconds)
    ours = sections["prefill"]["tokens_per_second"], sections["decode"]["tokens_per_second"]
    return {
        **asdict(fidelity),
        "own_prefill_tokens_per_second": own_prefill,
        "own_decode_tokens_per_second": own_decode,
        "prefill_ratio_to_own": ours[0] / own_prefill if own_prefill else None,
        "decode_ratio_to_own": ours[1] / own_decode if own_decode else None,
    }


def _tier_figures(kv: SessionKV) -> dict[Tier, TierFigures]:
    """Count the session's pages by tier: hot from the engine, the rest from the page table."""
    table = kv.handle.table.read(kv.geometry.blocks_for(max(kv.position, 1)))
    layers = kv.geometry.layers
    pages = {Tier.HOT: kv.arena.used_slots * layers}
    sizes = {Tier.HOT: kv.arena.used_bytes}
    for tier in (Tier.WARM, Tier.COLD):
        here = table.tier == tier
        pages[tier] = int(here.sum())
        sizes[tier] = sum(
            int(np.sum(here & (table.codec == codec))) * page_layout(kv.geometry, codec).slot_bytes
            for codec in map(CodecId, np.unique(table.codec[here]).tolist())
        )
    total = max(sum(pages.values()), 1)
    steps = max(kv.counts.steps, 1)
    return {
        tier: TierFigures(
            pages[tier], sizes[tier], pages[tier] / total, kv.counts.pages[tier] / steps
        )
        for tier in (Tier.HOT, Tier.WARM, Tier.COLD)
    }
