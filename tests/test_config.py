"""Settings: where each comes from, and each wrong one refused by its name."""

from pathlib import Path
from typing import Any

import pytest

from tierd import config as module
from tierd.config import check_memory, embedded_config, load_config, settings_of
from tierd.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("TIERD_")]:
        monkeypatch.delenv(name)


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(
        '[warm]\nbudget_bytes = "1GiB"\nslab_bytes = 8388608\n'
        '[service]\ndrain_seconds = "250ms"\n[cold]\nephemeral = true\n'
    )
    monkeypatch.setenv("TIERD_WARM__BUDGET_BYTES", "2GiB")
    monkeypatch.setenv("TIERD_SERVICE__LOG_LEVEL", "debug")
    config = load_config(file, overrides={"service.log_level": "error"})
    assert config.warm.budget_bytes == 2 << 30
    assert config.warm.slab_bytes == 8 << 20
    assert config.service.drain_seconds == 0.25
    assert config.service.log_level == "error"
    assert config.cold.ephemeral is True
    origins = {row.name: row.origin for row in settings_of(config)}
    assert origins["warm.budget_bytes"] == "environment"
    assert origins["warm.slab_bytes"] == f"file {file}"
    assert origins["service.log_level"] == "flag"
    assert origins["cold.cap_bytes"] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("warm.colour", 1),
        ("paint.colour", 1),
        ("warm", 1),
        ("warm.budget_bytes", "many"),
        ("warm.budget_bytes", 0),
        ("warm.budget_bytes", -1),
        ("warm.budget_bytes", 1.5),
        ("warm.budget_bytes", True),
        ("warm.slab_bytes", 4097),
        ("cold.slab_bytes", 100),
        ("cold.cap_bytes", -1),
        ("cold.cap_bytes", 1),
        ("warm.budget_bytes", "4095"),
        ("cold.ephemeral", 1),
        ("cold.ephemeral", "perhaps"),
        ("cold.folder", 7),
        ("limits.connections", "x"),
        ("limits.in_flight_calls", 0),
        ("service.drain_seconds", "soon"),
        ("service.drain_seconds", 0.0),
        ("service.drain_seconds", float("inf")),
        ("service.drain_seconds", float("nan")),
        ("service.drain_seconds", "9" * 400),
        ("warm.budget_bytes", "9" * 400),
        ("warm.budget_bytes", "-1MiB"),
        ("warm.budget_bytes", None),
        ("warm.slab_bytes", 0),
        ("warm.slab_bytes", "1kB"),
        ("cold.slab_bytes", -4096),
        ("cold.folder", ""),
        ("cold.folder", "a\0b"),
        ("service.socket", ""),
        ("service.socket", "@"),
        ("service.socket", "/run/a\0b"),
        ("service.socket", "/" + 52 * "ü"),
        ("service.log_level", "loud"),
        ("service.metrics_port", 65536),
        ("service.socket", "/tmp/" + 100 * "x"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(overrides={name: value})


def test_a_wrong_variable_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_WARM__BUDGET", "1GiB")
    with pytest.raises(ConfigError, match=r"warm\.budget"):
        load_config()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("warm = 3", "warm is not a section"),
        ("[warm", r"tierd\.toml is not TOML"),
        ("[warm]\nslab_bytes = 1\nslab_bytes = 2", r"tierd\.toml is not TOML"),
        ("[warm.deep]\nx = 1", r"warm\.deep"),
        ("[warm.budget_bytes]\nx = 1", r"warm\.budget_bytes"),
        ('[warm]\nx = "1"', r"warm\.x"),
        ("[warm]\nbudget_bytes = 2026-01-01", r"warm\.budget_bytes"),
        ("[warm]\nbudget_bytes = [1]", r"warm\.budget_bytes"),
        ("[service]\ndrain_seconds = nan", r"service\.drain_seconds"),
        ("[cold]\nephemeral = 1", r"cold\.ephemeral"),
        ('[limits]\nconnections = "\xff"', r"tierd\.toml"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "tierd.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=named):
        load_config(file)
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")


def test_a_socket_path_is_measured_with_its_suffix() -> None:
    path = "/tmp/" + "x" * (107 - len("/tmp/") - len(".rpc"))
    assert load_config(overrides={"service.socket": path}).service.socket == path
    with pytest.raises(ConfigError, match="108 bytes"):
        load_config(overrides={"service.socket": path + "x"})


def test_the_default_socket_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert load_config().service.socket == "/run/user/7/tierd/tierd.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert load_config().service.socket == "/tmp/tierd-7/tierd.sock"


def test_a_warm_tier_beyond_the_hosts_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 2 << 30)
    check_memory(load_config(overrides={"warm.budget_bytes": 1 << 30}))
    with pytest.raises(ConfigError, match=r"warm\.budget_bytes"):
        check_memory(load_config(overrides={"warm.budget_bytes": 2 << 30}))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 4 * GIB),
        ({"service": ("max", 3 * GIB, 0)}, 4 * GIB),
        ({"service": (9 * GIB, 3 * GIB, 0)}, 4 * GIB),
        ({"service": (5 * GIB, 3 * GIB, 0)}, 2 * GIB),
        ({"service": (5 * GIB, 4 * GIB, 2 * GIB)}, 3 * GIB),
        ({"service": (5 * GIB, 3 * GIB, 0), "": (4 * GIB, 3 * GIB, 0)}, GIB),
        ({".": (5 * GIB, 4 * GIB, 0)}, GIB),
        ({"service": (GIB, 2 * GIB, 0)}, -GIB),
    ],
    ids=["no cgroup", "no limit", "wide", "service", "page cache", "slice", "container", "beyond"],
)
def test_memory_is_what_the_host_and_every_cgroup_around_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], expected: int
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "user.slice" / "service").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n")
    inner = "/" if "." in limits else "/user.slice/service"
    (proc / "self" / "cgroup").write_text(f"1:cpu:/legacy\n0::{inner}\n")
    for name, (limit, used, cache) in limits.items():
        folder = cgroups if name == "." else cgroups / "user.slice" / name
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    monkeypatch.setattr(module, "_PROC", proc)
    monkeypatch.setattr(module, "_CGROUPS", cgroups)
    assert module.available_memory_bytes() == expected


def test_this_host_has_some_memory() -> None:
    assert 1 << 20 < module.available_memory_bytes() < 1 << 50


def test_an_embedded_daemons_settings_fit_its_job(tmp_path: Path) -> None:
    config = embedded_config(
        warm_bytes=100, cold_folder=str(tmp_path), cold_needed_bytes=(1 << 30) + 1
    )
    assert config.warm.budget_bytes >= 4096 and config.cold.slab_bytes % 4096 == 0
    assert config.cold.ephemeral and config.cold.folder == str(tmp_path)


def test_every_setting_has_a_row_with_its_unit() -> None:
    rows = {row.name: row for row in settings_of(load_config())}
    assert rows["warm.slab_bytes"].shown == "64.0 MiB"
    assert rows["service.drain_seconds"].shown == "2s"
    assert rows["cold.ephemeral"].shown == "false"
