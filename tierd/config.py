"""Settings: one declaration per option, read once, checked once, frozen.

Defaults < TOML file < TIERD_SECTION__KEY < overrides (flags). A wrong one is a
ConfigError that names the field; so is an unknown key.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tierd.errors import ConfigError, InvalidArgument
from tierd.units import GIB, MIB, SECTOR_BYTES, format_size, parse_duration, parse_size, round_up

ENV_PREFIX = "TIERD_"
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path holds 108 with its final zero
_RPC_SUFFIX_BYTES = len(".rpc")
WARM_DEFAULT_BYTES = 1 * GIB
# Of 1 MiB that is kept, journal, superblock and snapshots have 848 KiB (`coldcap`), which leaves
# 176 KiB for pages; of half a MiB they have all.
COLD_CAP_BYTES_MIN = 1 * MIB
_EMBEDDED_SLAB_BYTES_MIN = 16 * MIB
# Memory that a warm tier may not take: the daemon's own heap and the page cache's working set.
WARM_RESERVE_BYTES = 256 * MIB
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def _option(default: Any, kind: Callable[[str], Any], text: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text})


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise InvalidArgument(f"{text!r} is neither true nor false")


def default_socket() -> str:
    """Return the socket that daemon and client both use when none is named."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/tierd" if runtime else f"/tmp/tierd-{os.getuid()}"
    return f"{folder}/tierd.sock"


def default_cold_folder() -> str:
    """Return the folder of the cold tier when none is named."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return f"{base}/tierd/cold"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How clients reach the daemon."""

    socket: str = _option("", str, "unix socket; its folder is private to the user")
    drain_seconds: float = _option(2.0, parse_duration, "time for calls in flight at the end")
    log_level: str = _option("info", str, "debug, info, warning or error")
    metrics_port: int = _option(0, int, "port of Prometheus metrics on 127.0.0.1; 0: none")


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """The warm tier: host RAM."""

    budget_bytes: int = _option(WARM_DEFAULT_BYTES, parse_size, "RAM for warm pages in all")
    slab_bytes: int = _option(64 * MIB, parse_size, "largest slab")


@dataclass(frozen=True, slots=True)
class ColdSettings:
    """The cold tier: a folder on a disk."""

    folder: str = _option("", str, "folder of the cold tier")
    cap_bytes: int = _option(0, parse_size, "most bytes on disk; 0: 90 % of what is free")
    slab_bytes: int = _option(256 * MIB, parse_size, "largest slab file")
    ephemeral: bool = _option(False, _flag, "unlink slab files at once, so that none outlives us")


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What one client may ask for."""

    connections: int = _option(256, int, "bootstrap connections at once")
    in_flight_calls: int = _option(64, int, "calls in flight of one client")


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """All settings of a daemon. `origins` says where each came from."""

    service: ServiceSettings = field(default_factory=ServiceSettings)
    warm: WarmSettings = field(default_factory=WarmSettings)
    cold: ColdSettings = field(default_factory=ColdSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting, for people: `shown` is the value as they would write it."""

    name: str
    value: Any
    shown: str
    origin: str


_SECTIONS: dict[str, type[Any]] = {
    "service": ServiceSettings,
    "warm": WarmSettings,
    "cold": ColdSettings,
    "limits": LimitSettings,
}
_KINDS = {
    f"{section}.{option.name}": option.metadata["kind"]
    for section, declared in _SECTIONS.items()
    for option in fields(declared)
}


def load_config(
    file: str | os.PathLike[str] | None = None, *, overrides: Mapping[str, Any] | None = None
) -> DaemonConfig:
    """Return the settings in force. Raises ConfigError naming the field."""
    values: dict[str, Any] = {
        "service.socket": default_socket(),
        "cold.folder": default_cold_folder(),
    }
    origins = dict.fromkeys(_KINDS, "default")
    layers = (
        (_from_file(file), f"file {file}"),
        (_from_environment(), "environment"),
        (dict(overrides or {}), "flag"),
    )
    for layer, origin in layers:
        for name, value in layer.items():
            values[name] = _convert(name, value)
            origins[name] = origin
    sections = {
        section: declared(
            **{
                key.partition(".")[2]: value
                for key, value in values.items()
                if key.startswith(f"{section}.")
            }
        )
        for section, declared in _SECTIONS.items()
    }
    config = DaemonConfig(**sections, origins=origins)
    _check(config)
    return config


def embedded_config(
    *, warm_bytes: int, cold_folder: str | None = None, cold_needed_bytes: int = 0
) -> DaemonConfig:
    """Return the settings of a daemon inside a job's own process, sized for that job.

    Its cold files have no name, so the folder may be shared; default /var/tmp,
    which is on disk where /tmp is often RAM, the very thing a cold tier is to spare.
    """
    slab_bytes = min(max(cold_needed_bytes, _EMBEDDED_SLAB_BYTES_MIN), ColdSettings().slab_bytes)
    return load_config(
        overrides={
            "warm.budget_bytes": max(warm_bytes, SECTOR_BYTES),
            "cold.folder": cold_folder or "/var/tmp",
            "cold.slab_bytes": round_up(slab_bytes, SECTOR_BYTES),
            "cold.ephemeral": True,
            "service.log_level": "warning",
            "service.metrics_port": 0,
        }
    )


def _convert(name: str, value: Any) -> Any:
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(f"unknown setting {name}")
    if isinstance(value, str):
        try:
            return kind(value)
        except (InvalidArgument, ValueError) as error:
            raise ConfigError(f"{name}: {error}") from None
    # What is not text stands as it is in TOML or code: a plain number or a truth value.
    wanted: tuple[type, ...] = (str,)
    if kind is _flag:
        wanted = (bool,)
    elif kind is not str:
        wanted = (int, float) if kind is parse_duration else (int,)
    if isinstance(value, bool) != (kind is _flag) or not isinstance(value, wanted):
        raise ConfigError(f"{name}: {value!r} is of the wrong type")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: {value!r} is not a number of seconds")
    return value


def _from_file(file: str | os.PathLike[str] | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"settings file {file} is not UTF-8: byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {file} is not TOML: {error}") from None
    found: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"settings file {file}: {section} is not a section")
        found.update({f"{section}.{key}": value for key, value in table.items()})
    return found


def _from_environment() -> dict[str, str]:
    found = {}
    for variable, value in os.environ.items():
        section, mark, key = variable.removeprefix(ENV_PREFIX).partition("__")
        if variable.startswith(ENV_PREFIX) and mark:
            found[f"{section.lower()}.{key.lower()}"] = value
    return found


def _check(config: DaemonConfig) -> None:
    """Raise ConfigError for values that cannot work."""
    for name in (
        "warm.budget_bytes", "warm.slab_bytes", "cold.slab_bytes",
        "limits.connections", "limits.in_flight_calls", "service.drain_seconds",
    ):  # fmt: skip
        section, _, key = name.partition(".")
        if getattr(getattr(config, section), key) <= 0:
            raise ConfigError(f"{name} must be more than zero")
    for name, value in (
        ("warm.budget_bytes", config.warm.budget_bytes),
        ("cold.cap_bytes", config.cold.cap_bytes),
    ):
        if 0 < value < SECTOR_BYTES:
            raise ConfigError(f"{name} is {value} bytes, less than any page: {SECTOR_BYTES}")
    if not config.cold.ephemeral and 0 < config.cold.cap_bytes < COLD_CAP_BYTES_MIN:
        raise ConfigError(
            f"cold.cap_bytes is {config.cold.cap_bytes} bytes; the smallest that works is "
            f"{COLD_CAP_BYTES_MIN} ({format_size(COLD_CAP_BYTES_MIN)}), and more where the folder "
            "holds pages"
        )
    for name, value in (
        ("warm.slab_bytes", config.warm.slab_bytes),
        ("cold.slab_bytes", config.cold.slab_bytes),
    ):
        if value % SECTOR_BYTES:
            raise ConfigError(f"{name} is {value}, must be a multiple of {SECTOR_BYTES}")
    for name, text in (
        ("service.socket", config.service.socket.removeprefix("@")),
        ("cold.folder", config.cold.folder),
    ):
        if not text or "\0" in text:
            raise ConfigError(f"{name} must name a file, not {text!r}")
    if not 0 <= config.service.metrics_port <= 65535:
        raise ConfigError("service.metrics_port must be 0 to 65535")
    if config.cold.cap_bytes < 0:
        raise ConfigError("cold.cap_bytes must not be negative")
    if config.service.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError("service.log_level must be debug, info, warning or error")
    socket_bytes = len(os.fsencode(config.service.socket)) + _RPC_SUFFIX_BYTES
    if socket_bytes > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"service.socket: with .rpc the path is {socket_bytes} bytes, "
            f"a unix socket's is at most {SOCKET_PATH_BYTES_MAX}"
        )


def check_memory(config: DaemonConfig) -> None:
    """Raise ConfigError if the host, or its cgroup, has no room for the warm tier now."""
    room = available_memory_bytes() - WARM_RESERVE_BYTES
    if config.warm.budget_bytes > room:
        raise ConfigError(
            f"warm.budget_bytes is {format_size(config.warm.budget_bytes)}; this host has "
            f"{format_size(max(room, 0))} for it, {format_size(WARM_RESERVE_BYTES)} kept free"
        )


def available_memory_bytes() -> int:
    """Return min(MemAvailable, what each cgroup around this process leaves) in bytes."""
    available = _figure(_PROC / "meminfo", "MemAvailable:") * 1024
    inner = Path(_text(_PROC / "self/cgroup").partition("0::/")[2].partition("\n")[0])
    for folder in (_CGROUPS / inner, *(_CGROUPS / outer for outer in inner.parents)):
        limit = _text(folder / "memory.max").strip()  # none at the root, or without cgroup v2
        if limit not in ("", "max"):
            used = int(_text(folder / "memory.current"))
            # Files read once count as used, and are dropped before anything else is.
            used -= _figure(folder / "memory.stat", "inactive_file")
            available = min(available, int(limit) - used)
    return available


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _figure(file: Path, name: str) -> int:
    """Return the number that follows `name` in a file of lines; 0 if there is none."""
    for line in _text(file).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def settings_of(config: DaemonConfig) -> list[SettingRow]:
    """Return every setting with its origin, in the order of declaration."""
    rows = []
    for section, declared in _SECTIONS.items():
        for option in fields(declared):
            name = f"{section}.{option.name}"
            value = getattr(getattr(config, section), option.name)
            rows.append(SettingRow(name, value, _shown(name, value), config.origins[name]))
    return rows


def _shown(name: str, value: Any) -> str:
    if _KINDS[name] is parse_size:
        return format_size(value)
    if _KINDS[name] is parse_duration:
        return f"{value:g}s"
    return str(value).lower() if isinstance(value, bool) else str(value)
