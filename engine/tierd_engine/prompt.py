"""Prompts: a document and a question as token ids, of an exact length where one is asked.

The control tokens of a prompt are those of the model's chat template. What the
user gives is text: where it spells a control token, the letters are tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tierd.errors import InvalidArgument
from tierd_engine.loading import reading
from tierd_engine.pieces import first_ids, splits_between_words

_DOCUMENT_MARK = "\x00document\x00"
_QUESTION_MARK = "\x00question\x00"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how many tokens of the document are among them."""

    token_ids: list[int]
    document_tokens: int


def build_prompt(
    tokenizer: Any,
    document: str,
    question: str,
    context_tokens: int | None,
    refuse: Callable[[int], object] = lambda least: None,
) -> Prompt:
    """Return the prompt, with the document cut so that it is `context_tokens` long.

    Uses the model's chat template where it has one. Raises InvalidArgument if the
    question alone is longer, or the document is empty. `refuse`: is told, as a long document
    is tokenised, how many tokens the prompt has at least; what it raises ends that.
    """
    before_text, between_text, after_text = _around_document(tokenizer)
    before = template_ids(tokenizer, before_text) or _bos(tokenizer)
    after = [
        *plain_ids(tokenizer, f"{between_text}{question}"),
        *template_ids(tokenizer, after_text),
    ]
    frame = len(before) + len(after)
    room = None if context_tokens is None else context_tokens - frame
    # One token at least is read, so that a document without any is told from one without room.
    middle = first_ids(
        lambda text: plain_ids(tokenizer, text),
        document,
        None if room is None else max(room, 1),
        lambda least: refuse(frame + least),
        cuts_cleanly=_cuts_cleanly(tokenizer, document),
    )
    if not middle:
        raise InvalidArgument("the document holds no text")
    if room is not None and room < 1:
        raise InvalidArgument(
            f"a context of {context_tokens} tokens leaves no room for the document: "
            f"the question and its frame take {frame}"
        )
    return Prompt([*before, *middle, *after], len(middle))


def _cuts_cleanly(tokenizer: Any, text: str) -> bool:
    """Say whether the tokens of a text cut between words are those of the whole.

    One that spells a control token may be cut inside each of them, if the tokenizer finds one.
    """
    names = "|".join(re.escape(name) for name in _control_tokens(tokenizer).values())
    return splits_between_words(tokenizer) and not (names and re.search(names, text))


def build_followup(tokenizer: Any, question: str) -> list[int]:
    """Return the token ids that ask another question after an answer.

    With a chat template they begin by ending the answer's turn; see `follow`.
    """
    if not getattr(tokenizer, "chat_template", None):
        return plain_ids(tokenizer, f"\n\n{question}\n")
    turns = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _DOCUMENT_MARK},
        {"role": "user", "content": _QUESTION_MARK},
    ]
    _, rest = _part(_render(tokenizer, turns), _DOCUMENT_MARK)
    between, after = _part(rest, _QUESTION_MARK)
    return [
        *template_ids(tokenizer, between),
        *plain_ids(tokenizer, question),
        *template_ids(tokenizer, after),
    ]


def follow(token_ids: list[int], followup: list[int]) -> list[int]:
    """Return `followup` without the end of turn that `token_ids` ends with already."""
    return followup[1:] if followup[:1] == token_ids[-1:] else followup


def template_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a chat template's own text, control tokens among them."""
    return _tokenise(tokenizer, text, split_special_tokens=False)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a user's text, with no control token among them.

    Where the text spells a control token ("<|im_end|>"), its letters are
    tokenised. Raises InvalidArgument for text that is not Unicode, or that the
    tokenizer cannot but read as a control token.
    """
    controls = _control_tokens(tokenizer)
    ids = _tokenise(tokenizer, text, split_special_tokens=True)
    if controls.keys().isdisjoint(ids):
        return ids
    # The tokenizer does not call these special, the template uses them as such.
    ids = [
        token
        for piece in _cut_inside(text, controls)
        for token in _tokenise(tokenizer, piece, split_special_tokens=True)
    ]
    for token in ids:
        if token in controls:
            raise InvalidArgument(
                f"the text holds {controls[token]!r}, which this model's tokenizer "
                "cannot read as plain text"
            )
    return ids


def _tokenise(tokenizer: Any, text: str, *, split_special_tokens: bool) -> list[int]:
    with reading("the text cannot be tokenised"):
        text.encode()  # a lone surrogate: said plainly here, a TypeError in tokenizers
        ids: list[int] = tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=split_special_tokens,
            verbose=False,
        )["input_ids"]
    return ids


def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens, by id, that steer the model: the special ones and the template's."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    controls = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for token, added in tokenizer.added_tokens_decoder.items():
        # Blanks are added to some vocabularies as tokens, and stand in any template.
        if added.special or (added.content.strip() and added.content in template):
            controls[token] = added.content
    # What a tokenizer gives for any character that it does not know.
    controls.pop(tokenizer.unk_token_id, None)
    return controls


def _cut_inside(text: str, controls: dict[int, str]) -> list[str]:
    """Return `text` in pieces, cut after the first letter of each control token in it."""
    names = "|".join(re.escape(name) for name in controls.values())
    # A lookahead finds overlapping ones too.
    cuts = [match.start() + 1 for match in re.finditer(f"(?={names})", text)]
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def _around_document(tokenizer: Any) -> tuple[str, str, str]:
    """Return the template's text before the document, before the question, and after it."""
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n\n", "\n"
    message = {"role": "user", "content": f"{_DOCUMENT_MARK}\n\n{_QUESTION_MARK}"}
    before, rest = _part(_render(tokenizer, [message]), _DOCUMENT_MARK)
    return before, *_part(rest, _QUESTION_MARK)


def _render(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    with reading("the model's chat template cannot be used"):
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return text


def _part(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found:
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
