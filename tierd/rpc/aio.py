"""grpc.aio, kept up for the life of the process, and its servers collected in time.

When the last server or channel is collected, grpc.aio shuts down and joins its
poller thread: from whatever thread the garbage collector happens to run in,
and for ever if the objects' loop is gone by then. One reference that is never
given back keeps that from happening; the poller is a daemon thread.
"""

from __future__ import annotations

import asyncio
import functools
import gc

import grpc.aio


@functools.cache
def keep_aio_up() -> None:
    """Take that reference, once. Call it before making a server or channel of grpc.aio."""
    grpc.aio.init_grpc_aio()


async def collect_aio() -> None:
    """Collect stopped servers that are let go of, while their loop still runs.

    A server's finaliser schedules work on its loop; on a closed loop it fails,
    loudly and on the user's terminal.
    """
    gc.collect()
    await asyncio.sleep(0)
