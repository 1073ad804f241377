"""The link to the daemon: notices that it has died, finds the next one, hands the pages back.

A dead daemon takes nothing with it: warm pages are in memory that this process
maps, cold ones in files that it has open. So the engine goes on with what it
has; when it needs the daemon (to make room, to forget, to suspend) it waits for
the next one, bounded, and gives it the session's pages.

Invariants:
  a rejoin happens between steps only
  a step that began before a rejoin could have been due is never longer than STEP_SECONDS_MAX
    with a dead daemon: the next one lends no unclaimed slot for twice as long
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tierd.client import Client, SessionHandle
from tierd.errors import DaemonUnavailable, DeadlineExceeded, StaleGeneration

T = TypeVar("T")

REJOIN_SECONDS = 30.0  # how long a job waits for a daemon to be started again
QUICK_SECONDS = 0.25  # the most that a step waits which could do without
AGAIN_SECONDS = 0.05
STEP_SECONDS_MAX = 10.0  # half of the time that a new daemon waits for claims


class DaemonLink:
    """One session's way to its daemon. `rejoined` is called after each hand-over."""

    def __init__(self, client: Client, handle: SessionHandle, rejoined: Callable[[], None]) -> None:
        self.rejoin_seconds = REJOIN_SECONDS
        self.waits: Callable[[float], None] = lambda seconds: None  # told when a wait begins
        self.refused: Callable[[str], None] = lambda why: None  # told why nothing was taken back
        self.rejoins = 0
        self.pages_handed = 0
        self._client = client
        self._handle = handle
        self._rejoined = rejoined
        self._next_try_seconds = 0.0
        self._step_began_seconds = 0.0

    def begin_step(self) -> None:
        """Note a step, and rejoin if the daemon has died and another one answers."""
        self._step_began_seconds = time.monotonic()
        if self._client.lost and time.monotonic() >= self._next_try_seconds:
            try:
                self._rejoin(QUICK_SECONDS)
            except DaemonUnavailable:  # go on with what there is
                self._next_try_seconds = time.monotonic() + QUICK_SECONDS
            self._step_began_seconds = time.monotonic()

    def require_fresh(self) -> None:
        """Raise StaleGeneration if a dead daemon's slots may be another's before this step ends."""
        late = time.monotonic() - self._step_began_seconds > STEP_SECONDS_MAX
        if late and self._client.lost:
            raise StaleGeneration("the daemon died, and this step has gone on for too long")

    def run(self, action: Callable[[], T], *, repeatable: bool = False) -> T:
        """Do what needs the daemon; where it has died, wait for the next one and do it again.

        `repeatable`: also where it lives and does not answer in time, as one that was stopped:
        what it was asked it may do later, and `action` can be done over that. Raises what
        `action` does; DaemonUnavailable or DeadlineExceeded once `rejoin_seconds` have passed.
        """
        give_up_at = time.monotonic() + self.rejoin_seconds
        while True:
            try:
                return action()
            except DeadlineExceeded:
                if not repeatable or time.monotonic() >= give_up_at:
                    raise
            except DaemonUnavailable as error:
                if self._wait(give_up_at):
                    continue
                if not self._client.lost:
                    raise
                raise DaemonUnavailable(
                    f"the daemon at {self._client.socket} is gone, and no next one came within "
                    f"{self.rejoin_seconds:g} s: the job ends. A session that was kept is as it "
                    "was kept"
                ) from error

    def _wait(self, give_up_at: float) -> bool:
        """Wait for a daemon and hand over; say whether there is one before `give_up_at`."""
        self.waits(max(0.0, give_up_at - time.monotonic()))
        while time.monotonic() < give_up_at:
            if self._client.lost:  # one that drains answers "no" for a while before it goes
                try:
                    self._rejoin(max(AGAIN_SECONDS, give_up_at - time.monotonic()))
                except DaemonUnavailable:
                    pass
                else:
                    return True
            time.sleep(AGAIN_SECONDS)
        return False

    def _rejoin(self, deadline_seconds: float) -> None:
        self._client.reconnect(deadline_seconds=deadline_seconds)
        self.pages_handed += self._handle.hand_back()
        self.rejoins += 1
        if self._handle.refusal:
            self.refused(self._handle.refusal)
        self._rejoined()
