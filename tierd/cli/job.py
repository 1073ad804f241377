"""Running a long-document job from the command line: its daemon, its display, its report."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tierd.cli import exits
from tierd.cli.report import print_report
from tierd.cli.terminal import JobDisplay, print_json
from tierd.errors import InvalidArgument, StorageError, StorageFull
from tierd.units import format_size

if TYPE_CHECKING:
    from tierd_engine.runner import JobSpec
    from tierd_engine.sizing import JobSizes

WARM_DEFAULT = "25%"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job's pages go: a running daemon, or an embedded one with its own tiers."""

    daemon: str | None
    warm: str | None
    cold_dir: Path | None

    def __post_init__(self) -> None:
        if self.daemon is None:
            return
        for option, value in (("--warm", self.warm), ("--cold-dir", self.cold_dir)):
            if value is not None:
                raise InvalidArgument(
                    f"{option} and --daemon exclude each other: the daemon's own settings hold"
                )

    @property
    def warm_share(self) -> str:
        """The warm tier's size, as the job's spec wants it."""
        return WARM_DEFAULT if self.warm is None else self.warm


@dataclass(frozen=True, slots=True)
class Display:
    """How a job is shown."""

    as_json: bool
    quiet: bool


def run_job_command(spec: JobSpec, placement: Placement, display: Display) -> int:
    """Run a job, print its answer and its report, and return the exit code."""
    from tierd_engine.runner import prepare_job, run_job

    quiet = display.quiet or display.as_json
    with (
        _terminated_like_interrupted(),
        JobDisplay(stream_text=not display.as_json, quiet=quiet) as events,
    ):
        job = prepare_job(spec, placement.daemon)
        with _daemon_for(placement, job.sizes) as socket:
            report = run_job(job, socket=socket, events=events).to_dict()
    if display.as_json:
        print_json(report)
    elif not display.quiet:
        print_report(report)
    return exits.DEGRADED if report.get("degraded") else 0


@contextlib.contextmanager
def _daemon_for(placement: Placement, sizes: JobSizes) -> Iterator[str]:
    """Yield the socket of the daemon that the job is to use."""
    if placement.daemon is not None:
        yield placement.daemon
        return
    from tierd.config import embedded_config
    from tierd.daemon import EmbeddedDaemon

    folder = placement.cold_dir
    config = embedded_config(
        warm_bytes=sizes.warm_budget_bytes,
        cold_folder=None if folder is None else str(folder.expanduser().absolute()),
        cold_needed_bytes=sizes.cold_needed_bytes,
    )
    _require_room(Path(config.cold.folder), sizes.cold_needed_bytes)
    with EmbeddedDaemon(config) as daemon:
        yield daemon.socket


def _require_room(folder: Path, needed_bytes: int) -> None:
    """Raise StorageError or StorageFull, naming the folder, if the job cannot use it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(f"cold folder {folder} cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"cold folder {folder} is not writable")
    if free < needed_bytes:
        raise StorageFull(
            f"cold folder {folder} has {format_size(free)} free; the job needs "
            f"{needed_bytes} bytes ({format_size(needed_bytes)}): "
            "free some, or give a larger --warm, --hot or another --cold-dir"
        )


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the job as Ctrl-C does, so that its folders and daemon go."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
