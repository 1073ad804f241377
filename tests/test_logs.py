"""Logs: JSON lines on the stream they were given, without anything secret."""

import io
import json

from tierd.logs import HIDDEN, new_log
from tierd.types import digest8


def test_each_event_is_one_json_object() -> None:
    stream = io.StringIO()
    new_log("info", stream).bind(boot="b").info("serving", clients=2)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.items() >= {"event": "serving", "boot": "b", "clients": 2, "level": "info"}.items()
    assert event["timestamp"].endswith("Z")


def test_secrets_never_reach_the_log() -> None:
    stream = io.StringIO()
    new_log("debug", stream).warning("x", **dict.fromkeys(HIDDEN, "s3cret"))
    assert "s3cret" not in stream.getvalue()


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    log = new_log("warning", stream)
    log.info("no")
    log.error("yes")
    assert stream.getvalue().count("\n") == 1


def test_a_digest_stands_for_an_id() -> None:
    assert digest8(7) == digest8("7") != digest8(8)
    assert len(bytes.fromhex(digest8(7))) == 8
