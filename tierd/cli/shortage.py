"""Too little memory: which errors mean it, and the limit that they may stem from.

A process whose address space is limited (`ulimit -v`) is told so in many ways: by Python, by the
loader of shared libraries, by torch, by what starts a thread.
"""

from __future__ import annotations

import errno
import resource

from tierd.cli.streams import warn
from tierd.errors import InvalidArgument
from tierd.memorywords import NO_THREAD, says_shortage
from tierd.units import GIB, MIB, format_size

# Address space that a job takes beside its model and tiers: torch, transformers, kernels, threads.
JOB_ADDRESS_BYTES = 3 * GIB
# And a daemon beside its warm tier: gRPC's threads, which end the process where they cannot start.
SERVE_ADDRESS_BYTES = 850 * MIB
# What is needed depends on cores and libraries: of a job that should need 3.6 GiB, on two cores,
# 3.4 were enough and 3.1 were not.
_SURE_SHARE = 0.75


def is_shortage(error: BaseException) -> bool:
    """Say whether an error means that memory, or threads, are short."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError | ImportError):
        return says_shortage(str(error)) or NO_THREAD in str(error)
    return isinstance(error, MemoryError)


def address_limit() -> int | None:
    """Return how many bytes this process may map; None: any number."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most


def limit_named() -> str:
    """Return what to do about the limit of address space; "" if there is none."""
    most = address_limit()
    return "" if most is None else f"the process may map {format_size(most)}: raise ulimit -v"


def require_address_space(needed_bytes: int, who: str) -> None:
    """Refuse what may surely not map as much as it takes: LLVM and gRPC would end the process.

    What may just not is told so, and goes on. Raises InvalidArgument.
    """
    most = address_limit()
    if most is None or needed_bytes <= most:
        return
    said = f"{who} needs about {format_size(needed_bytes)} of address space; {limit_named()}"
    if most < needed_bytes * _SURE_SHARE:
        raise InvalidArgument(said)
    warn(said)
