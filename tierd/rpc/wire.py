"""Conversions between the wire's messages and tierd's own records. Pure.

Codecs have their own numbers on the wire, as on disk.
What a peer sent is checked here: InvalidArgument names the field.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.errors import InvalidArgument
from tierd.layercodecs import CodecChoice, layer_codecs
from tierd.rpc.v1 import tierd_pb2 as pb
from tierd.types import CodecId, DType, Geometry, Namespace, Place, Tier

_DTYPES = {
    DType.FLOAT32: pb.D_TYPE_FLOAT32,
    DType.BFLOAT16: pb.D_TYPE_BFLOAT16,
    DType.FLOAT16: pb.D_TYPE_FLOAT16,
}
_DTYPE_OF = {number: dtype for dtype, number in _DTYPES.items()}
_CODECS = {
    CodecId.RAW: pb.CODEC_RAW,
    CodecId.INT8: pb.CODEC_INT8,
    CodecId.K8V4: pb.CODEC_K8V4,
    CodecId.INT4: pb.CODEC_INT4,
    CodecId.FP8: pb.CODEC_FP8,
}
_TEXTS = (
    "weights_digest", "revision", "adapters", "rope", "rank_map", "tenant_salt", "codec_layers",
)  # fmt: skip
_U32 = np.dtype("<u4")
# A digest or a name has under 200 bytes, a list of adapters under 2,000. The daemon keeps
# these texts with each session, so they have a limit.
TEXT_BYTES_MAX = 4096


def request(kind: Any, **fields: Any) -> Any:
    """Return a message of `kind`. Raises InvalidArgument for what does not fit its field."""
    try:
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{kind.DESCRIPTOR.name}: {error}") from None


def session_number(session_id: str) -> int:
    """Return the number of a session's id (16 hex digits). Raises InvalidArgument."""
    if len(session_id) == 16 and set(session_id) <= set(string.hexdigits):
        return int(session_id, 16)
    raise InvalidArgument(f"{session_id!r} is not a session id: it has 16 hex digits")


def session_id(number: int) -> str:
    """Return a session's id for its number."""
    return f"{number:016x}"


def codec_to_wire(codec: CodecId | None) -> Any:
    """Return a codec's wire value; UNSPECIFIED for None."""
    return pb.CODEC_UNSPECIFIED if codec is None else _CODECS[codec]


def codec_of(number: int) -> CodecId | None:
    """Return the codec; None for UNSPECIFIED. Raises InvalidArgument."""
    if number == pb.CODEC_UNSPECIFIED:
        return None
    if number not in _CODECS.values():
        raise InvalidArgument(f"codec {number} is unknown to this daemon")
    return CodecId(number)


def namespace_to_wire(namespace: Namespace) -> Any:
    """Return a namespace as a message."""
    geometry = namespace.geometry
    return pb.Namespace(
        geometry=pb.Geometry(
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            dtype=_DTYPES[geometry.dtype],
            block_tokens=geometry.block_tokens,
        ),
        codec=codec_to_wire(namespace.codec),
        format_version=namespace.format_version,
        **{name: getattr(namespace, name) for name in _TEXTS},
    )


def namespace_from_wire(message: Any) -> Namespace:
    """Return a namespace. Raises InvalidArgument."""
    shape = message.geometry
    if shape.dtype not in _DTYPE_OF:
        raise InvalidArgument(f"geometry: dtype {shape.dtype} is unknown to this daemon")
    codec = codec_of(message.codec)
    if codec is None:
        raise InvalidArgument("namespace: codec is not given")
    for name in _TEXTS:
        text_bytes = len(getattr(message, name).encode())
        if text_bytes > TEXT_BYTES_MAX:
            raise InvalidArgument(
                f"namespace: {name} has {text_bytes} bytes, at most {TEXT_BYTES_MAX} are allowed"
            )
    geometry = Geometry(
        shape.layers, shape.kv_heads, shape.head_dim, _DTYPE_OF[shape.dtype], shape.block_tokens
    )
    namespace = Namespace(
        geometry=geometry,
        codec=codec,
        format_version=message.format_version,
        **{name: getattr(message, name) for name in _TEXTS},
    )
    layer_codecs(namespace)
    return namespace


def codecs_to_wire(codecs: Sequence[CodecId] | None) -> bytes:
    """Return a codec a layer as bytes; none for None."""
    return bytes(int(codec) for codec in codecs or ())


def codecs_of(data: bytes) -> list[CodecId] | None:
    """Return a codec a layer; None for no bytes. Raises InvalidArgument."""
    if not data:
        return None
    codecs = [codec_of(number) for number in data]
    if None in codecs:
        raise InvalidArgument("codecs: 0 is none")
    return [codec for codec in codecs if codec is not None]


def plan_to_wire(reservation: int, blocks: Sequence[int], places: Sequence[Sequence[Place]]) -> Any:
    """Return a plan's reply; `places[i][j]` is block i's layer j."""
    rows = [(place.slab, place.slot, place.generation) for layers in places for place in layers]
    columns = np.array(rows, dtype=_U32).T
    return pb.PlanDemotionReply(
        reservation=reservation,
        blocks=blocks,
        codecs=bytes(int(place.codec) for layers in places for place in layers),
        slabs=columns[0].tobytes(),
        slots=columns[1].tobytes(),
        generations=columns[2].tobytes(),
        cold=places[0][0].tier is Tier.COLD,
    )


def u32_column(data: bytes, blocks: int) -> npt.NDArray[np.uint32]:
    """Return a packed column as uint32 [blocks, layers]."""
    return np.frombuffer(data, dtype=_U32).reshape(blocks, -1)


def codec_column(data: bytes, blocks: int) -> npt.NDArray[np.uint8]:
    """Return the codecs of a plan's pages as uint8 [blocks, layers]."""
    return np.frombuffer(data, dtype=np.uint8).reshape(blocks, -1)


def token_ids_to_wire(token_ids: npt.NDArray[np.uint32]) -> bytes:
    """Return token ids as uint32 little endian. Raises InvalidArgument if one does not fit."""
    ids = np.asarray(token_ids)
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32):
        raise InvalidArgument("token ids must be integers from 0 to 2**32 - 1")
    return np.ascontiguousarray(ids, dtype=_U32).tobytes()


def token_ids_from_wire(data: bytes) -> npt.NDArray[np.uint32]:
    """Return token ids, uint32 [tokens], read-only."""
    return np.frombuffer(data, dtype=_U32)


def session_info_to_dict(info: Any) -> dict[str, Any]:
    """Return a session's row for people: plain values, the id first.

    `codec` is what was asked for, `page_codecs` what each layer's pages are stored as.
    """
    state = pb.SessionState.Name(info.state).removeprefix("SESSION_STATE_").lower()
    return {
        "id": session_id(info.session),
        "state": state,
        "kept": info.kept,
        "ram_only_blocks": info.ram_only_blocks,
        "removed_blocks": info.removed_blocks,
        "engine": info.engine_id or None,
        "codec": str(CodecChoice(CodecId(info.codec), info.codec_layers)),
        "page_codecs": [codec.name.lower() for codec in codecs_of(info.page_codecs) or ()],
        "block_tokens": info.block_tokens,
        "tokens": info.tokens,
        "sealed_blocks": info.sealed_blocks,
        "warm_pages": info.warm_pages,
        "cold_pages": info.cold_pages,
        "unused_seconds": round(info.unused_seconds, 3),
        "layers": info.layers,
        "namespace": info.namespace_digest.hex(),
    }


_TIER_FIELDS = (
    "pages", "bytes", "capacity_bytes", "used_bytes", "peak_bytes", "slabs",
    "reserved_slots", "retired_slots", "backup_pages", "backup_bytes",
)  # fmt: skip


def snapshot_to_wire(
    stats: dict[str, Any], *, device: str, uptime_seconds: float, clients: int
) -> Any:
    """Return Store.stats() (tierd/census.py has its shape) as a message. `device`: cold's."""
    hints = stats["hints"]
    return pb.SnapshotReply(
        tiers={
            name: pb.TierStats(
                **{field: tier[field] for field in _TIER_FIELDS},
                device=device if name == "cold" else "memory",
            )
            for name, tier in stats["tiers"].items()
        },
        counts={name: value for name, value in stats.items() if isinstance(value, int)},
        sessions=stats["sessions"],
        hints=pb.HintStats(
            counts={name: value for name, value in hints.items() if name != "clients"},
            clients={
                name: pb.HintCounts(counts=counts) for name, counts in hints["clients"].items()
            },
        ),
        uptime_seconds=uptime_seconds,
        clients=clients,
        troubles=stats["troubles"],
    )


def snapshot_to_dict(reply: Any) -> dict[str, Any]:
    """Return a snapshot as plain values: census.py's shape, with `device` of each tier."""
    return {
        "tiers": {
            name: {field: getattr(tier, field) for field in (*_TIER_FIELDS, "device")}
            for name, tier in sorted(reply.tiers.items(), reverse=True)  # warm, cold
        },
        **{name: reply.counts[name] for name in sorted(reply.counts)},
        "sessions": dict(reply.sessions),
        "hints": {
            **dict(reply.hints.counts),
            "clients": {name: dict(c.counts) for name, c in reply.hints.clients.items()},
        },
        "uptime_seconds": reply.uptime_seconds,
        "clients": reply.clients,
        "troubles": dict(reply.troubles),
    }
