"""The fences of the engine's work on a device: each record, and each wait for one, by name.

    filled      in    -> compute   a chunk's copy has ended          : it may be attended
    read        compute -> in      a chunk's last reader has ended   : it may be filled again
    cold copied in    -> host      a cold unit has left host staging : the disk may refill it
    settled     in    -> host      all copies of the step have ended : slots may be reused
    written     compute -> out     hot pages are whole               : they may be encoded
    demand      in    -> out       copies that a step waits for      : demotion goes after them
    copied out  out   -> host      pages and statuses are in RAM     : digest, commit or abort
    slots whole out   -> host      slots in VRAM have their headers  : the disk may read them
    out ended   out   -> host      the same, after an interruption   : abort
    query       compute -> near    q is made                         : it may be copied down
    query down  near  -> host      q is in RAM                       : the CPU may read it
    partial up  near  -> compute   (o, lse) is in VRAM               : it may be merged
    near ended  near  -> host      nothing is left on the stream     : buffers may be freed
    landing     compute -> host    a landed unit's reader has ended  : the disk may write there
    checked     check -> host      a landed unit's digests are made  : they may be compared

A test leaves out each member, and must see it.
"""

from __future__ import annotations

import enum


class Fence(enum.StrEnum):
    """Labels of records and waits."""

    RECORD_FILLED = "record: chunk filled"
    WAIT_FILLED = "wait: chunk filled"
    RECORD_READ = "record: chunk read"
    WAIT_READ = "wait: chunk read"
    RECORD_COLD_COPIED = "record: cold unit copied"
    WAIT_COLD_COPIED = "wait: cold unit copied"
    RECORD_SETTLED = "record: step's copies ended"
    WAIT_SETTLED = "wait: step's copies ended"
    RECORD_WRITTEN = "record: hot pages written"
    WAIT_WRITTEN = "wait: hot pages written"
    RECORD_DEMAND = "record: demand copies"
    WAIT_DEMAND = "wait: demand copies"
    RECORD_COPIED_OUT = "record: pages copied out"
    WAIT_COPIED_OUT = "wait: pages copied out"
    RECORD_SLOTS_WHOLE = "record: slots whole in VRAM"
    WAIT_SLOTS_WHOLE = "wait: slots whole in VRAM"
    RECORD_OUT_ENDED = "record: interrupted round ended"
    WAIT_OUT_ENDED = "wait: interrupted round ended"
    RECORD_QUERY = "record: query made"
    WAIT_QUERY = "wait: query made"
    RECORD_QUERY_DOWN = "record: query in RAM"
    WAIT_QUERY_DOWN = "wait: query in RAM"
    RECORD_PARTIAL_UP = "record: partial in VRAM"
    WAIT_PARTIAL_UP = "wait: partial in VRAM"
    RECORD_NEAR_ENDED = "record: near stream ended"
    WAIT_NEAR_ENDED = "wait: near stream ended"
    RECORD_LANDING_READ = "record: landing read"
    WAIT_LANDING_READ = "wait: landing read"
    RECORD_CHECKED = "record: digests made"
    WAIT_CHECKED = "wait: digests made"
