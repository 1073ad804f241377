"""Probes the path from a folder's disk into VRAM and back; prints a JSON object for `tierd doctor`.

A process of its own: what opens the driver may crash, or hang, and then nothing else does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tierd.errors import DeviceFailed, DeviceUnavailable
from tierd_engine.device.coldpath import PathKind
from tierd_engine.device.probing import ProbeResult, probe_folder


def probe_on_cuda(folder: Path) -> ProbeResult:
    """Return what the folder's disk allows on the first CUDA device."""
    from tierd_engine.device.cupyport import CupyDevice
    from tierd_engine.device.opening import cold_paths

    try:
        device = CupyDevice()
        return probe_folder(cold_paths(device), folder)
    except (DeviceUnavailable, DeviceFailed, OSError) as error:
        return ProbeResult(str(folder), PathKind.POSIX, str(error))


def main() -> int:
    """Print what the folder named on the command line allows."""
    found = probe_on_cuda(Path(sys.argv[1]))
    sys.stdout.write(json.dumps(found.figures()) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
