"""Settings of every test: threads, and how hypothesis searches.

Set before anything imports numpy, torch or numba: each makes its pool on import.
"""

import os
import signal
import sys
from collections.abc import Iterator

# CI and developers have two cores; more threads than cores make every pool wait for the others.
for _name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "2")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as share_cores: jobs beside us are no ruin
# Triton's own library reads this as it is imported, and PyTorch imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A run started in the background ignores these, and so would every process of a test.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A failure prints the blob that repeats it. Deadlines measure the machine, not the code.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _rigs_let_go() -> Iterator[None]:
    """Close what a test's rigs hold: a file descriptor each slab, and a process has 1,024."""
    yield
    if (rigs := sys.modules.get("tests.rig")) is not None:
        rigs.close_rigs()
