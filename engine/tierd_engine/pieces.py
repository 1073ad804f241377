"""Long texts in pieces: no more of one is tokenised than it takes to cut it, or to refuse it.

A text is cut between a letter and " x", a space before a letter. No word of the common byte-level
tokenizers spans that place, nor looks across it: their expressions look one character ahead, and
past white space alone. Where a tokenizer is one of those, and all cuts are such, the tokens of
the pieces, one after the other, are those of the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# A tenth of a second of tokenising. What is no longer than two of them is not cut.
PIECE_CHARS = 64 * 1024
# Of common vocabularies the longest token, of spaces, has 128. Words without an end cost a
# tokenizer more than their length: 60 MB of letters were 9 GB.
_TOKEN_CHARS_MAX = 128
_CLEAN_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_ENDS_OF_WORDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# What splits a text into words: cl100k's expression with numbers of three digits (Llama 3), and
# of one (Qwen 2). GPT-2's own is what ByteLevel(use_regex) stands for.
_KNOWN_WORDS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _ENDS_OF_WORDS
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a text. `is_clean`: it ends where a text can be cut between words."""

    text: str
    is_clean: bool


def cut(text: str) -> Iterator[Piece]:
    """Yield a text in pieces of PIECE_CHARS, up to twice as long where there is no clean cut."""
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        middle = start + PIECE_CHARS
        found = _CLEAN_CUT.search(text, middle - 1, middle + PIECE_CHARS)
        end = middle if found is None else found.end()
        yield Piece(text[start:end], found is not None)
        start = end
    yield Piece(text[start:], True)


def first_ids(
    tokenise: Callable[[str], list[int]],
    text: str,
    most: int | None,
    refuse: Callable[[int], object],
    *,
    cuts_cleanly: bool,
) -> list[int]:
    """Return the first `most` token ids of a text (None: all).

    They are the same as of the whole; or, where no place to cut is sure, as of its beginning,
    many times as long as they are.

    `refuse`: is told how many ids there are at least, up to `most`, and may raise: the rest is
    then not tokenised. `cuts_cleanly`: see `splits_between_words`. Where a cut may change tokens,
    half of the pieces' count is a sure least.
    """
    if len(text) <= 2 * PIECE_CHARS:
        return tokenise(text)[:most]
    ids: list[int] = []
    for piece in cut(text):
        ids += tokenise(piece.text)
        cuts_cleanly = cuts_cleanly and piece.is_clean
        least = len(ids) if cuts_cleanly else len(ids) // 2
        refuse(least if most is None else min(least, most))
        if most is not None and least >= most:
            break
    if cuts_cleanly:
        return ids[:most]
    if most is not None:
        begun = tokenise(text[: most * _TOKEN_CHARS_MAX])
        if len(begun) > most:
            return begun[:most]
    return tokenise(text)[:most]


def splits_between_words(tokenizer: Any) -> bool:
    """Say whether a tokenizer is known to read a text cut between words as it reads the whole."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(backend.model, "dropout", None):
        return False
    if _kind(backend.normalizer).get("type", "NFC") != "NFC":  # it joins nothing to a space
        return False
    for added in tokenizer.added_tokens_decoder.values():
        takes_the_space = added.rstrip and re.search(r"[A-Za-z]$", added.content)
        if takes_the_space or re.search(r"[A-Za-z] ", added.content):
            return False
    words = _kind(backend.pre_tokenizer)
    steps = words["pretokenizers"] if words.get("type") == "Sequence" else [words]
    return all(map(_is_known, steps)) and any(map(_splits_words, steps))


def _is_known(step: dict[str, Any]) -> bool:
    return step.get("type") in ("ByteLevel", "Digits") or _splits_words(step)


def _splits_words(step: dict[str, Any]) -> bool:
    if step.get("type") == "Split":
        is_known = step["pattern"].get("Regex") in _KNOWN_WORDS
        return is_known and step["behavior"] == "Isolated" and not step["invert"]
    return step.get("type") == "ByteLevel" and bool(step.get("use_regex", True))


def _kind(component: Any) -> dict[str, Any]:
    """Return what a tokenizer's component is saved as; {} for none, or one of Python's own."""
    if component is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(component.__getstate__())
    except (AttributeError, TypeError, ValueError):  # not to be saved: nothing is known of it
        return {"type": "unknown"}
    return found
