"""Steps that the tests of the store share."""

from collections.abc import Iterator

from tests.rig import LAYERS, Rig
from tierd.types import PageKey


def checked_rig() -> Iterator[Rig]:
    """A rig with engine 1: a fixture. Afterwards the store closes, and nothing is left."""
    rig = Rig()
    rig.engine(1)
    yield rig
    rig.store.check_integrity()
    rig.store.close()
    assert_empty(rig)


def assert_empty(rig: Rig) -> None:
    rig.store.check_integrity()
    for tier, figures in rig.store.stats()["tiers"].items():
        assert figures["used_bytes"] == figures["pages"] == 0, (tier, figures)


def warm(rig: Rig) -> dict[str, int]:
    return rig.store.stats()["tiers"]["warm"]


def plan(rig: Rig, session, blocks, need=None, **options):
    need = len(blocks) if need is None else need
    return rig.store.plan_demotion(session.engine_id, session.number, blocks, need, **options)


def commit(rig: Rig, session, planned) -> None:
    digests = rig.write(session, planned)
    rig.store.commit(session.engine_id, planned.reservation, digests)


def keys_of(session, block=1):
    return [PageKey(session.number, layer, block) for layer in range(LAYERS)]
