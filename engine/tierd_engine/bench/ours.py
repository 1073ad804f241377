"""How much of a decode step is ours and no kernel: plans, page-table reads, Python per call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from tierd_engine.attention import cpu, layercall
from tierd_engine.coldread import ColdReader
from tierd_engine.session import SessionKV
from tierd_engine.wholestep import WholeStep

_METHODS = ("begin", "append", "attend", "finish")
_WHOLE_METHODS = ("begin", "ready", "end")  # all that it does but to have its job run


class OursShare:
    """Times what is ours around a step less what it runs: the team's jobs, and waits for the disk.

    Ours are a session's methods, and those of a step that is one job.
    """

    def __init__(self, kv: SessionKV) -> None:
        self._kv = kv
        self._seconds = 0.0
        self._depth = 0  # of calls of ours within one another: the outermost is timed

    def measure(self, step: Callable[[], None], steps: int) -> float:
        """Return our share of a step's wall-clock, over `steps` steps."""
        ours: list[tuple[Any, str]] = [(self._kv, name) for name in _METHODS]
        ours += [(WholeStep, name) for name in _WHOLE_METHODS]
        run: list[tuple[Any, str]] = [(module, "run_team") for module in (cpu, layercall)]
        run.append((ColdReader, "_wait_for"))
        patches = [
            mock.patch.object(owner, name, self._timed(getattr(owner, name), sign))
            for names, sign in ((ours, 1), (run, -1))
            for owner, name in names
        ]
        for patch in patches:
            patch.start()
        try:
            start = time.perf_counter()
            for _ in range(steps):
                step()
            wall = time.perf_counter() - start
        finally:
            for patch in patches:
                patch.stop()
        return self._seconds / wall

    def _timed(self, call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            is_counted = sign < 0 or not self._depth
            self._depth += sign > 0
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._depth -= sign > 0
                if is_counted:
                    self._seconds += sign * (time.perf_counter() - start)

        return timed
