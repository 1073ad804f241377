"""Runs `tierd` with the given arguments in a child, and again each time it is killed.

Prints each child's pid. A fork takes milliseconds where a start takes a second.
"""

import ctypes
import os
import signal
import sys

import tierd.cli.app
import tierd.daemon

PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl


def main() -> None:
    while True:
        pid = os.fork()
        if pid == 0:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(1)
            os.open(os.devnull, os.O_WRONLY)
            sys.exit(tierd.cli.app.run())
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(
                f"the daemon ended by itself, with {os.waitstatus_to_exitcode(status)}"
            )


if __name__ == "__main__":
    main()
