"""Logs: one JSON object a line, on stderr unless told otherwise.

No token, text or name is ever logged: ids of sessions appear as `digest8` of them (types.py), which
`tierd sessions --json` shows beside them.
Nothing global is configured, so that a daemon inside a job leaves its logs alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

# Whatever a caller passes under these names does not reach a log.
HIDDEN = frozenset({"token", "tokens", "token_ids", "text", "prompt", "metadata", "tenant_salt"})


def new_log(level: str = "info", stream: TextIO | None = None) -> Any:
    """Return a structlog logger; `level` is debug, info, warning or error."""
    return structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr if stream is None else stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _hide,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        cache_logger_on_first_use=True,
    )


def _hide(log: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in HIDDEN & event.keys():
        event[name] = "(hidden)"
    return event
