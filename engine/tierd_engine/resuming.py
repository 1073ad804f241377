"""Kept sessions that a job resumes: whether it asks for the KV that they hold, and what differs.

The daemon knows a namespace by its digest alone: what could have made it is tried. What a user
asks for beside a session that was made otherwise is a usage error, found early or late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.client import Client, SessionHandle
from tierd.errors import InvalidArgument, LayoutMismatch, StaleGeneration
from tierd.layercodecs import parse_codec_choice
from tierd.types import DType, Namespace
from tierd_engine import hf
from tierd_engine.weightonly import Weights

if TYPE_CHECKING:
    from tierd_engine.runner import JobSpec

# Factors of --rope-scaling that are tried: 1 to 64 by halves. With two kinds, three dtypes and
# two kinds of weights that is 1,524 digests of some 20 µs: 30 ms, before a refusal alone.
_FACTORS_TRIED = [half / 2 for half in range(2, 129)]


@dataclass(frozen=True, slots=True)
class _Making:
    """Options that a session was made with. `rope` None: without --rope-scaling."""

    dtype: DType
    weights: Weights
    rope: str | None


def held_dtype(spec: JobSpec, held: Mapping[str, Any], folder: Path, shape: hf.ModelShape) -> DType:
    """Return the dtype of the session that a job resumes, of this very model.

    `held`: the daemon's row of it. Raises InvalidArgument: what differs, as far as it is known.
    """
    who = f"session {spec.resume}"
    if held["layers"] != shape.layers:
        raise InvalidArgument(
            f"{who} is of another model: that has {held['layers']} layers, "
            f"{spec.model} has {shape.layers}"
        )
    made = _making_of(spec, held, folder, shape)
    if made is None:
        rope = "with another --rope-scaling, " if shape.scales else ""
        raise InvalidArgument(
            f"{who} was made {rope}with another model than {spec.model}, or with other weights "
            "in it; give what it was made with"
        )
    differs = list(_differences(spec, made))
    if differs:
        raise InvalidArgument(f"{who} was made {' and '.join(differs)}; resume it as it was made")
    return made.dtype


def resume_session(
    client: Client, session: str, namespace: Namespace, tokens: int
) -> SessionHandle:
    """Resume what was there to be resumed when the job was prepared. As Client.resume.

    Raises InvalidArgument if it has meanwhile become another's, as if that had been seen then.
    """
    try:
        return client.resume(session, namespace, tokens)
    except (StaleGeneration, LayoutMismatch) as error:
        raise InvalidArgument(str(error)) from error


def _differences(spec: JobSpec, made: _Making) -> Iterator[str]:
    if spec.dtype not in ("auto", made.dtype):
        yield f"with --dtype {made.dtype}"
    if Weights.parse(spec.weights) is not made.weights:
        is_plain = made.weights is Weights.AUTO
        yield "without --weights int8" if is_plain else f"with --weights {made.weights}"
    if made.rope != spec.rope_scaling:
        yield "without --rope-scaling" if made.rope is None else f"with --rope-scaling {made.rope}"


def _making_of(
    spec: JobSpec, held: Mapping[str, Any], folder: Path, shape: hf.ModelShape
) -> _Making | None:
    """Return the options that give a session's namespace with this model; None: none tried do."""
    choice = parse_codec_choice(held["codec"])
    plain = hf.namespace_for(
        folder, shape, DType.FLOAT32, choice.base, int(held["block_tokens"]), choice.layers
    )
    for text, rope in _ropes(spec.rope_scaling, folder, shape):
        for weights in Weights:
            digest = hf.changed_digest(plain.weights_digest, weights)
            for dtype in DType:
                geometry = replace(plain.geometry, dtype=dtype)
                tried = replace(plain, rope=rope, weights_digest=digest, geometry=geometry)
                if tried.digest().hex() == held["namespace"]:
                    return _Making(dtype, weights, text)
    return None


def _ropes(
    asked: str | None, folder: Path, shape: hf.ModelShape
) -> Iterator[tuple[str | None, str]]:
    """Yield values of --rope-scaling (None: without) and the rope of each, the one asked first."""
    yield asked, shape.rope
    if not shape.scales:
        return
    config = hf.load_config(folder)
    yield None, hf.model_shape(config).rope
    if not shape.trained_tokens:
        return
    for kind in ("linear", "yarn"):
        for factor in _FACTORS_TRIED:
            text = f"{kind}:{factor:g}"
            yield text, hf.scaled_rope(config, text)
