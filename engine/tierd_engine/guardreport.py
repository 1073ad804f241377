"""The quality guard's part of a report: which layers got another codec, and why."""

from __future__ import annotations

import math
from typing import Any

from tierd.layercodecs import describe_codecs
from tierd_engine.guard import KL_LIMITS, LayerReading, QualityGuard, Verdict


def guard_section(guard: QualityGuard | None, *, followed: bool) -> dict[str, Any]:
    """Return the JSON object. Errors are relative L2 errors of attention's output.

    `source`: "off", "not needed" (no block left hot), "measured", or "resumed": the session's
    pages were decided on before. `error` and `budget` are root mean squares over the layers.
    """
    if guard is None:
        return {"source": "off"}
    verdict = guard.verdict
    if verdict is None:
        return {"source": "not needed: no encoded block left the hot tier"}
    readings = verdict.readings
    section: dict[str, Any] = {
        "source": verdict.source,
        "codecs": describe_codecs(guard.base, verdict.codecs),
        "followed": followed,
        "raised": [_raised(reading, verdict) for reading in verdict.raised],
    }
    if verdict.source == "measured":
        section |= {
            "moments": verdict.moments,
            "tokens": verdict.tokens,
            "queries": verdict.queries,
            "seconds": verdict.seconds,
            "error": _rms([reading.error for reading in readings]),
            "error_chosen": _rms([reading.chosen_error for reading in readings]),
            "budget": _rms([reading.budget for reading in readings]),
            "errors": [_number(reading.error) for reading in readings],
        }
    return section


def _raised(reading: LayerReading, verdict: Verdict) -> dict[str, Any]:
    asked, chosen = reading.asked.name.lower(), reading.chosen.name.lower()
    why = f"the session's pages of this layer are {chosen} already"
    if verdict.source == "measured":
        why = (
            f"{asked} moves the layer's output by {reading.error:.2e}; a mean KL of "
            f"{KL_LIMITS[reading.asked]:g} allows {reading.budget:.2e} a layer"
        )
    return {
        "layer": reading.layer,
        "asked": asked,
        "chosen": chosen,
        "error": _number(reading.error),
        "error_chosen": _number(reading.chosen_error),
        "budget": reading.budget,
        "why": why,
    }


def _rms(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.sqrt(sum(value**2 for value in known) / len(known)) if known else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
