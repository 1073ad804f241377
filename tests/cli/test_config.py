"""`tierd config show`: every setting, its value, and where it came from."""

import json
from pathlib import Path
from typing import Any

import pytest


def test_settings_are_listed_with_their_origins(
    tierd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text('[warm]\nbudget_bytes = "2GiB"\n')
    monkeypatch.setenv("TIERD_COLD__CAP_BYTES", "3GiB")
    outcome = tierd("config", "show", "--config", str(file), "--json")
    settings = json.loads(outcome.out)["settings"]
    assert settings["warm.budget_bytes"] == {"value": 2 << 30, "origin": f"file {file}"}
    assert settings["cold.cap_bytes"] == {"value": 3 << 30, "origin": "environment"}
    assert settings["warm.slab_bytes"]["origin"] == "default"


def test_the_table_shows_origins_only_when_asked(tierd: Any) -> None:
    assert "default" not in tierd("config", "show").out
    assert "default" in tierd("config", "show", "--origin").out


def test_no_cap_reads_as_what_is_free(tierd: Any, tmp_path: Path) -> None:
    shown = tierd("config", "show").out
    assert "unlimited (90% of " in shown and "free)" in shown
    file = tmp_path / "tierd.toml"
    file.write_text('[cold]\ncap_bytes = "3GiB"\n')
    shown = tierd("config", "show", "--config", str(file)).out
    assert "unlimited" not in shown and "3.0 GiB" in shown


def test_an_unknown_setting_is_named(tierd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_WARM__COLOUR", "blue")
    outcome = tierd("config", "show")
    assert outcome.code == 2
    assert outcome.err == "tierd: error: unknown setting warm.colour\n"


def test_a_settings_file_that_is_not_there_is_named(tierd: Any, tmp_path: Path) -> None:
    outcome = tierd("config", "show", "--config", str(tmp_path / "none.toml"))
    assert outcome.code == 2
    assert "none.toml" in outcome.err


def test_a_settings_file_that_cannot_be_read_says_why_in_words(tierd: Any, tmp_path: Path) -> None:
    absent, binary = tmp_path / "none.toml", tmp_path / "binary.toml"
    binary.write_bytes(b"caf\xe9")
    wanted = f"tierd: error: settings file {absent}: No such file or directory\n"
    assert tierd("config", "show", "--config", str(absent)).err == wanted
    assert "is not UTF-8: byte 3" in tierd("config", "show", "--config", str(binary)).err
