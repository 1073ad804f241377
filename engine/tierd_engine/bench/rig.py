"""One session on an embedded daemon, for benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierd.client import Client
from tierd.config import embedded_config
from tierd.daemon import EmbeddedDaemon
from tierd.layercodecs import layer_codecs
from tierd.types import CodecId, Geometry, Namespace
from tierd_engine.attention.plan import PlanMode
from tierd_engine.device.opening import DeviceRig
from tierd_engine.guard import QualityGuard
from tierd_engine.session import SessionKV


@contextlib.contextmanager
def open_session_kv(
    geometry: Geometry,
    codec: CodecId,
    heads: int,
    *,
    hot_bytes: int,
    warm_bytes: int,
    total_tokens: int,
    plan: PlanMode,
    cold_folder: str | None = None,
    cold_needed_bytes: int = 0,
    rig: DeviceRig | None = None,
    codec_layers: str = "",
    guarded: bool = False,
) -> Iterator[SessionKV]:
    """Yield a fresh session's KV with compiled kernels; free slots of hot hold NaN.

    `codec_layers`: exceptions of `codec`, in canonical text. `guarded`: the quality guard is on.
    """
    config = embedded_config(
        warm_bytes=warm_bytes, cold_folder=cold_folder, cold_needed_bytes=cold_needed_bytes
    )
    with (
        EmbeddedDaemon(config) as daemon,
        Client.connect(daemon.socket) as client,
    ):
        namespace = Namespace(
            geometry, weights_digest="bench", codec=codec, codec_layers=codec_layers
        )
        guard = QualityGuard(namespace) if guarded else None
        handle = client.open_session(namespace, total_tokens)
        kv = SessionKV(client, handle, heads, hot_bytes, total_tokens, plan, guard, rig)
        try:
            kv.executors.warm_up(
                {*layer_codecs(namespace), *(guard.codecs() if guard is not None else ())}
            )
            kv.arena.poison()
            yield kv
        finally:
            kv.close()
