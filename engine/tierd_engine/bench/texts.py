"""Real texts that every CPython carries: its language reference by kind, and its library's source.

A topic of the reference belongs to one kind only, the first below of which it
holds most: tables, grammar, code, and prose for the rest. So the texts are
disjoint, whole topics in their own order, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tierd.errors import InvalidArgument

# 8,192 tokens and 448 more, at 3 characters a token where tables make them short, twice over.
_KIND_CHARACTERS = 52_000
_SOURCE_MODULE = "argparse"
_CODE_SIGNS = (">>>", " = ", "():", "print(", "def ", "class ")


def python_reference() -> str:
    """Return CPython's language reference, 465 KB of English prose (113,108 SmolLM2 tokens)."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def text_of(name: str) -> str:
    """Return a text of at least some 50,000 characters. Raises InvalidArgument.

    One of `TEXT_NAMES`, or `WHOLE`, of which four of them are parts.
    """
    if name == WHOLE:
        return python_reference()
    if name not in TEXT_NAMES:
        raise InvalidArgument(f"{name!r} is not a text; choose one of {', '.join(TEXT_NAMES)}")
    if name == "source":
        return library_source()
    from pydoc_data.topics import topics

    return split_by_kind(topics)[name]


def split_by_kind(topics: dict[str, str]) -> dict[str, str]:
    """Return the topics, each in one text: tables, grammar, code and prose."""
    left = dict(topics)
    texts = {}
    for kind, share in _SHARES.items():
        chosen: set[str] = set()
        size = 0
        for name in sorted(left, key=lambda name: (-share(left[name]), name)):
            if size >= _KIND_CHARACTERS:
                break
            chosen.add(name)
            size += len(left[name])
        texts[kind] = "\n".join(text for name, text in left.items() if name in chosen)
        left = {name: text for name, text in left.items() if name not in chosen}
    texts["prose"] = "\n".join(left.values())
    return texts


def library_source() -> str:
    """Return Python source of the running interpreter's library: argparse."""
    spec = find_spec(_SOURCE_MODULE)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidArgument(f"this Python has no source of its library's {_SOURCE_MODULE}")
    return Path(spec.origin).read_text(encoding="utf-8")


def _share(parts: list[str], belongs: Callable[[str], bool]) -> float:
    return sum(len(part) for part in parts if belongs(part)) / max(1, sum(map(len, parts)))


def _table_share(text: str) -> float:
    return _share(text.splitlines(), lambda line: line.lstrip().startswith(("|", "+-", "+=")))


def _grammar_share(text: str) -> float:
    return _share(text.split("\n\n"), lambda part: "::=" in part)


def _code_share(text: str) -> float:
    return _share(
        text.split("\n\n"),
        lambda part: part.startswith("   ") and any(sign in part for sign in _CODE_SIGNS),
    )


_SHARES = {"tables": _table_share, "grammar": _grammar_share, "code": _code_share}
WHOLE = "reference"
TEXT_NAMES = ("prose", *_SHARES, "source")
