"""Real text that every CPython carries: the language reference, as `pydoc_data.topics`."""

from __future__ import annotations


def python_reference() -> str:
    """Return CPython's language reference, 465 KB of English prose (113,108 SmolLM2 tokens)."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())
