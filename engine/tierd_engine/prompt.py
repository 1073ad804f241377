"""Prompts: a document and a question as token ids, of an exact length where one is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierd.errors import InvalidArgument

_DOCUMENT_MARK = "\x00document\x00"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how many tokens of the document are among them, of how many."""

    token_ids: list[int]
    document_tokens: int
    document_tokens_given: int


def build_prompt(
    tokenizer: Any, document: str, question: str, context_tokens: int | None
) -> Prompt:
    """Return the prompt, with the document cut so that it is `context_tokens` long.

    Uses the model's chat template where it has one. Raises InvalidArgument if the
    question alone is longer, or the document is empty.
    """
    before_text, after_text = _around_document(tokenizer, question)
    before = tokenizer(before_text, add_special_tokens=False)["input_ids"]
    before = before or _bos(tokenizer)
    after = tokenizer(after_text, add_special_tokens=False)["input_ids"]
    middle = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    if not middle:
        raise InvalidArgument("the document holds no text")
    given = len(middle)
    if context_tokens is not None:
        room = context_tokens - len(before) - len(after)
        if room < 1:
            raise InvalidArgument(
                f"a context of {context_tokens} tokens leaves no room for the document: "
                f"the question and its frame take {len(before) + len(after)}"
            )
        middle = middle[:room]
    return Prompt([*before, *middle, *after], len(middle), given)


def build_followup(tokenizer: Any, question: str) -> list[int]:
    """Return the token ids that ask another question after an answer.

    With a chat template they begin by ending the answer's turn; see `follow`.
    """
    text = f"\n\n{question}\n"
    if getattr(tokenizer, "chat_template", None):
        turns = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _DOCUMENT_MARK},
            {"role": "user", "content": question},
        ]
        whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        text = whole.partition(_DOCUMENT_MARK)[2]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def follow(token_ids: list[int], followup: list[int]) -> list[int]:
    """Return `followup` without the end of turn that `token_ids` ends with already."""
    return followup[1:] if followup[:1] == token_ids[-1:] else followup


def _around_document(tokenizer: Any, question: str) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        return "", f"\n\n{question}\n"
    message = {"role": "user", "content": f"{_DOCUMENT_MARK}\n\n{question}"}
    text: str = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, mark, after = text.partition(_DOCUMENT_MARK)
    if not mark:
        raise InvalidArgument("the model's chat template does not keep the user's text")
    return before, after


def _bos(tokenizer: Any) -> list[int]:
    token = getattr(tokenizer, "bos_token_id", None)
    wanted = getattr(tokenizer, "add_bos_token", False)
    return [token] if wanted and token is not None else []


class TextStream:
    """Turns token ids into text as they come, whole characters only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self.text = ""

    def push(self, token_id: int) -> str:
        """Append a token and return the text that is now certain."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def end(self) -> str:
        """Return what was held back, once no token follows."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        # A character whose last bytes are still to come decodes to U+FFFD.
        if not final and whole.endswith("\ufffd"):
            return ""
        fresh: str = whole[len(self.text) :]
        self.text = whole
        return fresh
