"""Steps that the tests of the mover share."""

import asyncio

from tests.rig import INT8_BLOCK, Rig
from tierd.types import PageKey, Tier


def make(warm_blocks: int = 4, cold_blocks: int = 64) -> Rig:
    rig = Rig(warm_blocks * INT8_BLOCK, cold_blocks * INT8_BLOCK)
    rig.engine(1)
    return rig


async def start(coroutine) -> asyncio.Task:
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


async def turns(rig: Rig, task: asyncio.Task, passes: int = 40) -> None:
    """Pump, run the lanes and let the task go on, until it is done."""
    for _ in range(passes):
        rig.mover.pump()
        rig.store.check_integrity()
        rig.lanes.run()
        rig.mover.pump()
        await asyncio.sleep(0)
        if task.done():
            return
    raise AssertionError("the task was not answered")


async def demote(rig: Rig, session, blocks, version: int = 0, **options) -> list[int]:
    """Demote through the mover, which makes room."""
    done: list[int] = []
    left = list(blocks)
    while left:
        task = await start(
            rig.mover.plan_demotion(session.engine_id, session.number, left, len(left), **options)
        )
        await turns(rig, task)
        planned = task.result()
        digests = rig.write(session, planned, version)
        rig.store.commit(session.engine_id, planned.reservation, digests)
        done += planned.blocks
        left = [block for block in left if block not in done]
    return done


def intact(rig: Rig, session, version: int = 0) -> None:
    """Check the bytes of every page of the session, wherever it is."""
    for (layer, block), page in session.index:
        key = PageKey(session.number, layer, block)
        expected = rig.payload(session, key, page.place.codec, version)
        assert rig.bytes_of(session, layer, block) == expected, (layer, block, page.place)


def cool(rig: Rig, session) -> None:
    """Take all of a session's pages to cold."""
    rig.move(rig.pages(session, Tier.WARM), Tier.COLD)
    rig.store.tick()
