"""How PyTorch's threads wait, set before it brings its OpenMP library.

Left alone, GNU OpenMP's threads spin for milliseconds when they have nothing
to do. Beside another job that holds a core the spinning thread keeps the
working one off it: measured on two cores with three other programs at work,
2,048 tokens of SmolLM2 fell to 23-76 tokens/s of prefill and 2-3 steps/s. A
thousand spins (some microseconds) before sleeping gave 250-270 and 17-18,
ten thousand 64-138 and 4-9, none at all 198-235 and 7-19. Large operators, as
in prefill, do not notice; the small ones of a decode step run on a team of our
own, which waits as the machine allows (attention/patience.py).
"""

from __future__ import annotations

import os

SPINS = 1000


def share_cores() -> None:
    """Let idle threads sleep soon, unless the environment says how they wait. Before torch."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def threads_sleep_soon() -> bool:
    """Return whether waking a thread is to be paid for: idle ones sleep within microseconds."""
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return True
    spins = os.environ.get("GOMP_SPINCOUNT", "")
    return spins.isdigit() and int(spins) <= 10 * SPINS
