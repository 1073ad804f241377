"""End-to-end tests run on one thread: tiny models gain nothing from a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from tests.e2e.support import TRAINED_TOKENS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Take one thread of torch's and Numba's, and give back what was there."""
    before = torch.get_num_threads(), numba.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(before[1])
    torch.set_num_threads(before[0])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model in Hugging Face layout; a token is a byte of text."""
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    tf.PreTrainedTokenizerFast(tokenizer_object=bytes_).save_pretrained(folder)
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=12, num_key_value_heads=4, head_dim=16,
        max_position_embeddings=TRAINED_TOKENS, initializer_range=0.2,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
