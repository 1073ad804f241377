"""How much of a decode step is ours and no kernel: plans, page-table reads, Python per call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from tierd_engine.attention import cpu, layercall, team
from tierd_engine.session import SessionKV

_METHODS = ("begin", "append", "attend", "finish")


class OursShare:
    """Times a session's methods less the attention kernels inside them."""

    def __init__(self, kv: SessionKV) -> None:
        self._kv = kv
        self._seconds = 0.0

    def measure(self, step: Callable[[], None], steps: int) -> float:
        """Return our share of a step's wall-clock, over `steps` steps."""
        patches = [
            mock.patch.object(self._kv, name, self._timed(getattr(self._kv, name), 1))
            for name in _METHODS
        ]
        for module in (cpu, layercall):
            patches.append(mock.patch.object(module, "run_team", self._timed(team.run_team, -1)))
        for patch in patches:
            patch.start()
        try:
            start = time.perf_counter()
            waited = self._kv.reader.wait_seconds
            for _ in range(steps):
                step()
            wall = time.perf_counter() - start
        finally:
            for patch in patches:
                patch.stop()
        return (self._seconds - (self._kv.reader.wait_seconds - waited)) / wall

    def _timed(self, call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._seconds += sign * (time.perf_counter() - start)

        return timed
