"""When this process began to read our sources: what changed later is not what it runs."""

from __future__ import annotations

import time

# A file system's clock may be a tick behind.
BEGAN_NS = time.time_ns() - 10_000_000
