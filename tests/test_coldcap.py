"""The smallest cold cap that holds what is there, and what a daemon says of a smaller one."""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.wirerig import small_config, store_session
from tierd.client import Client
from tierd.coldcap import slab_room_bytes, smallest_cap_bytes
from tierd.config import COLD_CAP_BYTES_MIN, DaemonConfig
from tierd.daemon import EmbeddedDaemon
from tierd.errors import ConfigError
from tierd.units import GIB, KIB, MIB


def test_the_smallest_cap_holds_the_slabs_and_a_mebibyte_less_does_not() -> None:
    rng = random.Random(1)
    sizes = [0, 1, MIB, 100 * MIB, *(rng.randrange(2**e, 2 ** (e + 1)) for e in range(12, 50))]
    for slabs_bytes in sizes:
        cap_bytes = smallest_cap_bytes(slabs_bytes)
        assert slab_room_bytes(cap_bytes) >= slabs_bytes
        assert cap_bytes == MIB or slab_room_bytes(cap_bytes - MIB) < slabs_bytes
    assert smallest_cap_bytes(100 * GIB) < 103 * GIB


def config(folder: Path, cap_bytes: int) -> DaemonConfig:
    return small_config(folder, **{"cold.ephemeral": False, "cold.cap_bytes": cap_bytes})


@contextmanager
def tool(settings: DaemonConfig) -> Iterator[Client]:
    with EmbeddedDaemon(settings) as daemon, Client.connect(daemon.socket, kind="tool") as client:
        yield client


def test_the_smallest_cap_that_is_taken_keeps_a_session_and_half_of_it_holds_nothing(
    tmp_path: Path,
) -> None:
    with tool(config(tmp_path, COLD_CAP_BYTES_MIN)) as client:
        assert client.stats()["tiers"]["cold"]["capacity_bytes"] > 64 * KIB
    settings = config(tmp_path, COLD_CAP_BYTES_MIN)
    with EmbeddedDaemon(settings) as daemon, Client.connect(daemon.socket) as job:
        store_session(job, 2)
    with tool(config(tmp_path, COLD_CAP_BYTES_MIN)) as client:
        assert client.sessions()[0]["kept"]
    assert slab_room_bytes(COLD_CAP_BYTES_MIN // 2) == 0
    with pytest.raises(ConfigError, match=r"cold\.cap_bytes is \d+ bytes; the smallest .* 1048576"):
        config(tmp_path, COLD_CAP_BYTES_MIN - 1)


def test_a_cap_below_what_is_there_is_refused_with_the_smallest_and_the_way_below(
    tmp_path: Path,
) -> None:
    with EmbeddedDaemon(config(tmp_path, 64 * MIB)) as daemon, Client.connect(daemon.socket) as job:
        sessions = [store_session(job, 60) for _ in range(6)]
    with pytest.raises(ConfigError) as refused, EmbeddedDaemon(config(tmp_path, MIB)):
        pass
    said = str(refused.value)
    slabs = sum(file.stat().st_size for file in (tmp_path / "cold/slab").iterdir())
    assert f"{slabs:,d} bytes" in said and "sessions --drop" in said and "fsck" in said
    kept_bytes = int(re.findall(r"them ([0-9,]+),", said)[0].replace(",", ""))
    assert slabs / 2 < kept_bytes <= slabs
    smallest = int(re.findall(r"--cold-cap (\d+)MiB", said)[0]) * MIB
    with pytest.raises(ConfigError), EmbeddedDaemon(config(tmp_path, smallest - MIB)):
        pass
    with tool(config(tmp_path, smallest)) as client:
        for session in sessions[1:]:
            client.close_session(session)
    # Slabs of the namespace that is left are empty now: a smaller cap lets them go.
    with tool(config(tmp_path, smallest - 2 * MIB)) as client:
        (row,) = client.sessions()
        assert row["id"] == sessions[0] and row["cold_pages"] == 2 * 60
    left = sum(file.stat().st_size for file in (tmp_path / "cold/slab").iterdir())
    assert left < slabs - MIB
