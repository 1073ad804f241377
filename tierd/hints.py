"""Hints: a client's word on what will be needed, by when, how surely. Bodies follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HintTicket:
    """Answer to a hint: `pages` are to be moved, in about `estimated_seconds`."""

    hint_id: int
    pages: int
    estimated_seconds: float
