"""Models on the disk, tiny and whole: a folder in Hugging Face layout, and a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<turn>"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
# What a vocabulary may hold that is not special: the template's own, and what it does not use.
ADDED = ["<turn>", "<other>"]


def tiny_config(**changes: Any) -> Any:
    """Return the config of a Llama with 4 heads, 2 KV heads and 2 layers."""
    fields = {
        "vocab_size": 256 + len(SPECIAL) + len(ADDED),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": 257,
    }
    return tf.LlamaConfig(**{**fields, **changes})


def byte_letters() -> list[str]:
    """Return the 256 letters that stand for bytes in a byte-level vocabulary."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_tokenizer() -> Any:
    """Return a tokenizer of bytes, with control tokens and a chat template."""
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(byte_letters())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ADDED)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def tiny_folder(path: Path, **changes: Any) -> Path:
    """Write a whole model to `path` and return it."""
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tiny_config(**changes)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_gguf(path: Path, *, layers: int = 2) -> Path:
    """Write a whole GGUF model of two layers, said to have `layers`, and return its path."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    tokens = [*byte_letters(), *SPECIAL, *ADDED, "th"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL) + [4] * len(ADDED) + [1])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)
    for name, shape in _gguf_tensors(len(tokens)):
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(tokens: int) -> list[tuple[str, tuple[int, ...]]]:
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (tokens, 32)),
        ("output_norm.weight", (32,)),
        ("output.weight", (tokens, 32)),
    ]
    for layer in range(2):
        shapes = {
            "attn_norm": (32,), "ffn_norm": (32,),
            "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
            "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
        }  # fmt: skip
        tensors += [(f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    return tensors
