"""Runs a program in a child, and again each time it ends: a fork takes milliseconds.

    python -m tests.e2e.respawn serve OPTIONS…       the daemon
    python -m tests.e2e.respawn victim SOCKET SEED   an engine (tests/e2e/victim.py)

Prints "pid N" for each child. A daemon that ends with an error ends this too.
"""

import ctypes
import os
import signal
import sys

import tierd.cli.app
import tierd.daemon
from tests.e2e import victim

PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl


def child() -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.argv[1] == "victim":
        victim.live(sys.argv[2], int(sys.argv[3]) + os.getpid())
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)
    return tierd.cli.app.run()


def main() -> None:
    while True:
        pid = os.fork()
        if pid == 0:
            sys.exit(child())
        print(f"pid {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
            raise SystemExit(f"it ended by itself, with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
