"""Running a long-document job from the command line: its daemon, its display, its report."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.cli import checks, interrupts
from tierd.cli.report import print_report
from tierd.cli.shortage import JOB_ADDRESS_BYTES, address_limit, require_address_space
from tierd.cli.streams import require_stdout, warn
from tierd.cli.terminal import JobDisplay, hush_libraries, print_json
from tierd.errors import InvalidArgument, StorageError, StorageFull
from tierd.units import format_size

if TYPE_CHECKING:
    from tierd_engine.jobcheck import Request
    from tierd_engine.runner import PreparedJob
    from tierd_engine.sizing import JobSizes

# As the daemon does without a cap: of the free space, the rest stays for others.
COLD_FREE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job's pages go: a running daemon, or an embedded one with its own tiers."""

    daemon: str | None
    hot: str | None
    warm: str | None
    cold_dir: str | None

    def __post_init__(self) -> None:
        for option, value in (("--warm", self.warm), ("--cold-dir", self.cold_dir)):
            if self.daemon is not None and value is not None:
                raise InvalidArgument(
                    f"{option} and --daemon exclude each other: the daemon's own settings hold"
                )

    def check(self) -> None:
        """Refuse what cannot work. Makes the cold folder, and calls on the daemon."""
        if self.daemon is None:
            checks.cold_folder("--cold-dir", self.cold_dir)
            return
        from tierd.client import Client

        Client.connect(self.daemon, kind="tool").close()


@dataclass(frozen=True, slots=True)
class Display:
    """How a job is shown."""

    as_json: bool
    quiet: bool


def run_job_command(fields: Mapping[str, Any], placement: Placement, display: Display) -> int:
    """Run a job, print its answer and its report, and return the exit code.

    `fields`: those of the engine's JobSpec, whose import takes seconds: what can be refused
    without it is refused before.
    """
    require_stdout()
    require_address_space(JOB_ADDRESS_BYTES, "a job")
    # With --json, stderr is a person's only where it is a terminal.
    quiet = display.quiet or (display.as_json and not sys.stderr.isatty())
    hush_libraries(quiet=quiet)
    from tierd_engine.cores import share_cores

    share_cores()
    with JobDisplay(stream_text=not display.as_json, quiet=quiet) as events:
        events.working("starting the engine")
        with interrupts.at_once():
            from tierd_engine.jobcheck import Request, check_request

            check_request(fields["model"], _request(Request, fields))
            placement.check()
            from tierd_engine.report import NotKept
            from tierd_engine.runner import JobSpec, prepare_job, run_job
        events.working("reading the model and the prompt (a .gguf file is converted once)")
        job = prepare_job(JobSpec(**fields), placement.daemon)
        short = _short_document(job)
        if short and not quiet:
            events.note(short)
        hot_bytes = job.sizes.hot_bytes if job.device == "cpu" else 0
        require_address_space(_address_bytes(job, hot_bytes), "the job")
        try:
            with _daemon_for(placement, job.sizes, hot_bytes) as socket:
                report = run_job(job, socket=socket, events=events).to_dict()
        except NotKept as error:
            if display.as_json:  # else the answer stands there already
                print_json({**error.report.to_dict(), "error": str(error)})
            raise
        if job.spec.keeps and not quiet:
            events.note(_kept(report))
    if job.spec.keeps and display.quiet and not display.as_json:
        warn(_kept(report))  # nothing else says how to go on with it
    if display.as_json:
        print_json(report)
    elif not display.quiet:
        print_report(report)
    return 0


def _request(kind: type[Request], fields: Mapping[str, Any]) -> Request:
    """Return what of a job its model may not allow. A resumed one brings no document."""
    names = ("codec", "context_tokens", "max_new_tokens", "rope_scaling")
    document = None if fields.get("resume") is not None else fields["document"]
    return kind(document=document, **{name: fields[name] for name in names})


def _short_document(job: PreparedJob) -> str:
    """Say that --context asks for more than there is; "" if it does not."""
    wanted = job.spec.context_tokens
    if wanted is None or job.sizes.context_tokens >= wanted:
        return ""
    return (
        f"--context {wanted:,} is more than there is: document and prompt are "
        f"{job.sizes.context_tokens:,} tokens, all are read"
    )


def _kept(report: Mapping[str, Any]) -> str:
    return f"session {report['session']['id']} is kept; ask more with --resume"


@contextlib.contextmanager
def _daemon_for(placement: Placement, sizes: JobSizes, hot_bytes: int) -> Iterator[str]:
    """Yield the socket of the daemon that the job is to use. `hot_bytes`: of hot that is in RAM."""
    if placement.daemon is not None:
        _require_memory(hot_bytes, "--hot")
        yield placement.daemon
        return
    from tierd.config import embedded_config
    from tierd.daemon import EmbeddedDaemon

    _require_memory(hot_bytes + sizes.warm_budget_bytes, "--hot and --warm")
    folder = checks.cold_folder("--cold-dir", placement.cold_dir)
    config = embedded_config(
        warm_bytes=sizes.warm_budget_bytes,
        cold_folder=None if folder is None else str(folder),
        cold_needed_bytes=sizes.cold_needed_bytes,
    )
    _require_room(Path(config.cold.folder), sizes.cold_needed_bytes, sizes.cold_unguarded_bytes)
    with EmbeddedDaemon(config) as daemon:
        yield daemon.socket


def _address_bytes(job: PreparedJob, hot_bytes: int) -> int:
    """Return what of its address space a job takes: of its model, what the weights' files hold."""
    if address_limit() is None:
        return 0
    from tierd_engine.modelcheck import weight_files

    weights_bytes = sum(file.stat().st_size for file in weight_files(job.folder))
    warm_bytes = 0 if job.shared else job.sizes.warm_budget_bytes
    return JOB_ADDRESS_BYTES + weights_bytes + hot_bytes + warm_bytes


def _require_memory(needed_bytes: int, options: str) -> None:
    from tierd.config import available_memory_bytes

    free = available_memory_bytes()
    if needed_bytes > free:
        raise InvalidArgument(
            f"the job needs {format_size(needed_bytes)} of memory for its tiers, and "
            f"{format_size(max(free, 0))} are free: give a smaller {options}"
        )


def _require_room(folder: Path, needed_bytes: int, unguarded_bytes: int) -> None:
    """Raise StorageError or StorageFull, naming the folder, if the job cannot use it.

    `unguarded_bytes`: what it needs where no layer may get a better codec than was asked for.
    """
    checks.usable_folder(folder)
    try:
        free = int(shutil.disk_usage(folder).free * COLD_FREE_SHARE)
    except OSError as error:
        raise StorageError(f"cold folder {folder} cannot be used: {error.strerror}") from None
    if free < needed_bytes:
        unguarded = ""
        if unguarded_bytes <= free:
            unguarded = (
                f", or --no-guard: it needs {format_size(unguarded_bytes)}, the guard may keep "
                "every layer raw"
            )
        raise StorageFull(
            f"cold folder {folder} has {format_size(free)} free; the job needs "
            f"{needed_bytes} bytes ({format_size(needed_bytes)}): "
            f"free some, or give a larger --warm, --hot or another --cold-dir{unguarded}"
        )
