"""Model folders are refused without torch: each kind of damage is one line that names the file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierd.errors import InvalidArgument, UnsupportedModel
from tierd_engine.modelcheck import check_folder, check_model

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "head_dim": None,
    "vocab_size": 251,
}
GGUF_HEADER = struct.pack("<4sIQQ", b"GGUF", 3, 2, 2)
LAYERS = ["full_attention", "sliding_attention"]


def safetensors_bytes(data: bytes = bytes(64)) -> bytes:
    """Return a file of one float32 tensor."""
    tensor = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that passes."""
    path = tmp_path / "model"
    path.mkdir()
    write_config(path, {})
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(safetensors_bytes())
    return path


def write_config(path: Path, changes: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def refusal(path: Path | str) -> str:
    """Return the one line that `path` is refused with."""
    with pytest.raises(InvalidArgument) as raised:
        check_folder(path)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder)
    check_model(str(folder))


def test_a_whole_folder_of_shards_passes(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_folder(folder)


def test_checking_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, tierd_engine.modelcheck; "
        "print(sorted({'torch', 'transformers', 'numpy', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["", "  ", "/nowhere/model", "a\0b", "x" * 300, "~no-such-user/m"])
def test_a_name_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="model"):
        check_model(name)


def test_a_file_that_is_no_gguf_is_refused_by_its_name(folder: Path) -> None:
    assert "neither a folder nor" in refusal(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
    ],
    ids=["empty", "cut", "deep", "not-utf8", "list", "no-type", "type-number"],
)
def test_a_config_that_is_none_is_refused(folder: Path, text: str, reason: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    message = refusal(folder)
    assert reason in message and "config.json" in message


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 4}, "4 KV heads do not divide 6"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": -6}, "num_attention_heads is -6"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"hidden_size": 49}, "do not divide a hidden size of 49"),
        ({"hidden_size": "x"}, "hidden_size is 'x'"),
        ({"hidden_size": 48.5}, "hidden_size is 48.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"vocab_size": []}, "vocab_size is []"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"n_head": 0}, "n_head is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_number_that_cannot_be_is_named(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    write_config(folder, changes)
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "bert"}, "encoder"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"layer_types": LAYERS}, "sliding-window"),
        ({"layer_types": ["full_attention", "mamba"]}, "hybrid"),
        ({"layer_types": ["odd"]}, "layers of type odd"),
        ({"state_size": 16}, "hybrid"),
        ({"model_type": "mamba", "state_size": 16}, "no attention: it is a recurrent"),
        ({"model_type": "mamba2", "state_size": 128}, "no attention: it is a recurrent"),
        ({"model_type": "falcon_mamba", "state_size": 16}, "no attention: it is a recurrent"),
        ({"model_type": "rwkv", "attention_hidden_size": 64}, "no attention: it is a recurrent"),
        ({"model_type": "rwkv7"}, "no attention: it is a recurrent"),
        ({"model_type": "xlstm"}, "no attention: it is a recurrent"),
        ({"layer_types": ["mamba", "mamba"]}, "no attention: it is a recurrent"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        ({"attention_chunk_size": 8192}, "chunked"),
        ({"attn_logit_softcapping": 50.0}, "caps"),
        ({"text_config": {}}, "multimodal"),
        ({"num_key_value_heads": [1, 2]}, "differ from layer to layer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_that_tiers_do_not_support_is_refused_by_name(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    write_config(folder, changes)
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        check_folder(folder)
    assert str(raised.value).startswith(f"model {changes.get('model_type', 'llama')}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None},
        {"model_type": "qwen2", "sliding_window": 4096},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "bert", "is_decoder": True},
        {"hidden_size": 49, "head_dim": 8},
        {"model_type": "unheard_of"},
    ],
    ids=str,
)
def test_what_only_transformers_can_tell_passes(folder: Path, changes: dict[str, Any]) -> None:
    write_config(folder, changes)
    check_folder(folder)


def test_a_folder_without_a_tokenizer_is_told_whole(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    message = refusal(folder)
    assert "has no tokenizer" in message and "tokenizer.json" in message
    assert message.endswith("is there")


def test_a_tokenizer_config_that_is_none_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is not valid JSON" in refusal(folder)


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:count]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(0), "cut short"),
        (cut(7), "cut short"),
        (cut(8), "cut short"),
        (cut(40), "cut short"),
        (lambda whole: whole[:-1], "cut short: it has"),
        (lambda whole: whole + b"x", "where its header tells"),
        (lambda whole: b"\xff" * len(whole), "header's length"),
        (lambda whole: whole[:8] + b"x" + whole[9:], "header is broken"),
        (lambda whole: whole.replace(b"data_offsets", b"data_offsetz"), "header is broken"),
        (lambda whole: whole.replace(b"[0, 64]", b"[9, 06]"), "header is broken"),
        (lambda whole: whole.replace(b"[0, 64]", b"[64, 0]"), "header is broken"),
        (lambda whole: (2).to_bytes(8, "little") + b"[]", "header is broken"),
    ],
)
def test_damaged_weights_are_refused(
    folder: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    (folder / "model.safetensors").write_bytes(damage(safetensors_bytes()))
    message = refusal(folder)
    assert reason in message and "model.safetensors" in message


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {"w": 3}}', "not a file's name"),
        (b'{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors is missing"),
    ],
)
def test_a_broken_index_of_shards_is_refused(folder: Path, index: bytes, reason: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(index)
    assert reason in refusal(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_a_folder_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    assert refusal(folder)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not begin with GGUF"),
        (bytes(100), "does not begin with GGUF"),
        (b"GGUF\3\0\0\0", "cut short"),
        (GGUF_HEADER, "cut short"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 2, 2) + bytes(200), "version 9"),
        (b"GGUF" + bytes(100), "version 0"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0) + bytes(200), "no model"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 1) + bytes(200), "cut short"),
    ],
)
def test_a_damaged_gguf_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert reason in refusal(path)


def test_a_gguf_whose_beginning_is_sound_passes(tmp_path: Path) -> None:
    path = tmp_path / "MODEL.GGUF"
    path.write_bytes(GGUF_HEADER + bytes(200))
    check_folder(path)
