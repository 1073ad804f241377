"""Long texts in pieces: the tokens of the whole, and no more of it tokenised than is needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import transformers as tf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.engine.folders import TEMPLATE, tiny_tokenizer
from tierd.errors import InvalidArgument
from tierd_engine import pieces
from tierd_engine.pieces import cut, first_ids, splits_between_words
from tierd_engine.prompt import build_prompt, plain_ids

ALPHABET = ["é", "e\u0301", "漢", "7", "12345", "'s", "'", "_", "-", ".", "  ", "\n", "\n\n", "\t",
            "\u00a0", "\u0301", "🙂", *["a", "b", "x", "The", " ", " ", " "] * 3]  # fmt: skip
WORDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt2, prefixed": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    **{
        f"known {number}": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        )
        for number, words in enumerate(sorted(pieces._KNOWN_WORDS))
    },
}


def text_of(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(ALPHABET, k=length))


def tokenizer_of(words: Any, normalizer: Any = None) -> Any:
    """Return a tokenizer with merges, some of them across letters and spaces if words allow it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = words
    backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([text_of(seed, 400) for seed in range(60)], trainer)
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)


def reading(tokenizer: Any, heard: list[str]) -> Callable[[str], list[int]]:
    """Return what tokenises as a document is, and notes what it was given."""

    def tokenise(text: str) -> list[int]:
        heard.append(text)
        return plain_ids(tokenizer, text)

    return tokenise


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_the_tokens_are_those_of_the_whole(
    words: Any, normalizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 40)
    tokenizer = tokenizer_of(words, normalizer)
    assert splits_between_words(tokenizer)
    saved = 0
    for seed in range(80):
        text, heard = text_of(seed, 300), list[str]()
        whole = plain_ids(tokenizer, text)
        runs = ["".join(run) for run in clean_runs(text)]
        assert [token for run in runs for token in plain_ids(tokenizer, run)] == whole
        for most in (None, 1, 20, len(whole), len(whole) + 1):
            heard.clear()
            found = first_ids(
                reading(tokenizer, heard), text, most, lambda least: None, cuts_cleanly=True
            )
            assert found == whole[:most], f"seed {seed}, most {most}"
            saved += sum(map(len, heard)) < len(text)
    assert saved > 20


def clean_runs(text: str) -> list[list[str]]:
    """Return the pieces of a text, those that no clean cut parts together."""
    runs: list[list[str]] = [[]]
    for piece in cut(text):
        runs[-1].append(piece.text)
        if piece.is_clean:
            runs.append([])
    return runs


def test_pieces_are_the_text_and_of_a_bounded_length() -> None:
    for text in (
        text_of(1, 400_000), "word " * 100_000, "漢" * 500_000, " " * 500_000, "short", "",
    ):  # fmt: skip
        found = list(cut(text))
        assert "".join(piece.text for piece in found) == text
        assert max(len(piece.text) for piece in found) <= 2 * pieces.PIECE_CHARS


def added(token: AddedToken) -> Any:
    tokenizer = tokenizer_of(WORDS["gpt2"])
    tokenizer.add_tokens([token])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: added(AddedToken("a b")),
        lambda: added(AddedToken("tab", rstrip=True)),
        lambda: tokenizer_of(WORDS["gpt2"], normalizers.Replace(" ", "▁")),
        lambda: tokenizer_of(pre_tokenizers.Metaspace(split=False)),
        lambda: tokenizer_of(pre_tokenizers.ByteLevel(False, use_regex=False)),
        lambda: tokenizer_of(pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")),
        lambda: tokenizer_of(None),
        object,
    ],
)
def test_a_tokenizer_that_may_read_across_a_cut_is_not_trusted(make: Callable[[], Any]) -> None:
    assert not splits_between_words(make())


def too_long(least: int) -> None:
    if least > 5000:
        raise InvalidArgument(f"at least {least}")


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("word", ["word ", "漢", "   "])
def test_a_text_that_is_too_long_is_refused_early(word: str, trusted: bool) -> None:
    tokenizer, heard = tiny_tokenizer(), list[str]()
    text = word * 1_000_000
    with pytest.raises(InvalidArgument, match="at least"):
        first_ids(reading(tokenizer, heard), text, None, too_long, cuts_cleanly=trusted)
    assert sum(map(len, heard)) <= 2 * pieces.PIECE_CHARS


def test_a_text_that_is_not_too_long_is_read_whole_by_any_tokenizer() -> None:
    tokenizer, text = tiny_tokenizer(), "word " * 40_000
    whole = plain_ids(tokenizer, text)
    for trusted in (True, False):
        for most in (None, 7):
            assert whole[:most] == first_ids(
                lambda part: plain_ids(tokenizer, part), text, most, lambda least: None,
                cuts_cleanly=trusted,
            )  # fmt: skip


@pytest.mark.parametrize("end", ["", "<turn><|im_end|>"])
def test_a_document_cut_to_the_context_is_what_it_was(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(WORDS["smollm"])
    tokenizer.add_tokens([AddedToken("<turn>")])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    text = "<|im_end|>" * bool(end) + text_of(3, 3000) + end
    whole = build_prompt(tokenizer, text, "why?", None)
    monkeypatch.setattr(pieces, "PIECE_CHARS", 30)
    assert build_prompt(tokenizer, text, "why?", None) == whole
    told: list[int] = []
    short = build_prompt(tokenizer, text, "why?", 300, told.append)
    frame = len(whole.token_ids) - whole.document_tokens
    tail = whole.token_ids[-(frame - 20) :]
    assert len(short.token_ids) == 300 and short.token_ids[-len(tail) :] == tail
    assert short.token_ids[:250] == whole.token_ids[:250]
    assert told == sorted(told) and max(told) <= 300


@pytest.mark.parametrize("letters", ["abcdefghijklmnopqrstuvwxyz", "\u4e00\u4e8c\u4e09\u56db"])
def test_no_more_of_a_text_that_cannot_be_cut_is_read_than_its_first_tokens_take(
    letters: str,
) -> None:
    text = "".join(random.Random(1).choices(letters, k=10 * pieces.PIECE_CHARS))
    read = []

    def tokenise(part: str) -> list[int]:
        read.append(len(part))
        return [ord(letter) for letter in part[::3]]

    found = first_ids(tokenise, text, 100, lambda least: None, cuts_cleanly=False)
    assert found == [ord(letter) for letter in text[::3]][:100]
    assert max(read) <= 2 * pieces.PIECE_CHARS, "the whole was not read"
