"""The quality guard's part of a report: which layers got another codec, and why."""

from __future__ import annotations

import math
from typing import Any

from tierd.layercodecs import CodecChoice, describe_codecs, layer_codecs
from tierd.types import CodecId, Namespace
from tierd_engine.guard import LayerReading, QualityGuard, Verdict


def guard_section(
    guard: QualityGuard | None, namespace: Namespace, *, followed: bool, resumed: bool = False
) -> dict[str, Any]:
    """Return the JSON object. Errors are relative L2 errors of attention's output, `kl`s mean
    KLs in nats where the model reads again what it has read (rehearsal.py).

    `source`: "off" (with `why`), "not needed" (codec raw, or no block left hot), "measured", or
    "resumed": the session's pages were decided on before. `resumed`: the session had pages.
    """
    if set(layer_codecs(namespace)) == {CodecId.RAW}:
        return {"source": "not needed: codec raw is exact, there is nothing to guard"}
    if guard is None:
        asked = CodecChoice(namespace.codec, namespace.codec_layers)
        keeps = f"pages keep the codecs they have, new ones get {asked}"
        return {
            "source": "off",
            "why": f"--no-guard; {keeps if resumed else f'all layers keep to {asked}'}",
        }
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
            "kl_asked": verdict.kl_asked,
            "kl_chosen": verdict.kl_chosen,
            "kl_limit": verdict.kl_limit,
            "errors": [_number(reading.error) for reading in readings],
            "kls": [_number(reading.kl) for reading in readings],
        }
    return section


def _raised(reading: LayerReading, verdict: Verdict) -> dict[str, Any]:
    asked, chosen = reading.asked.name.lower(), reading.chosen.name.lower()
    why = f"the session's pages of this layer are {chosen} already"
    if verdict.source == "measured":
        why = (
            f"where the model repeats what it has read, {asked} moves the layer's output by "
            f"{reading.error:.1e}, which costs a mean KL of {reading.kl:.1e}; all layers "
            f"together may cost {verdict.kl_limit:g}"
        )
    return {
        "layer": reading.layer,
        "asked": asked,
        "chosen": chosen,
        "error": _number(reading.error),
        "kl": _number(reading.kl),
        "kl_chosen": _number(reading.chosen_kl),
        "why": why,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
