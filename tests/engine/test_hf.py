"""Models: unsupported attention is refused by name; folders and rope scaling are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from tierd.errors import InvalidArgument, UnsupportedModel
from tierd.types import CodecId, DType
from tierd_engine import hf

UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("mistral", lambda: tf.MistralConfig(sliding_window=128), "sliding-window"),
    ("gemma2", lambda: tf.Gemma2Config(), "sliding-window"),
    ("gemma3_text", lambda: tf.Gemma3TextConfig(), "sliding-window"),
    ("deepseek_v3", lambda: tf.DeepseekV3Config(), "MLA"),
    ("jamba", lambda: tf.JambaConfig(), "hybrid"),
    ("mamba", lambda: tf.MambaConfig(), "it has no attention"),
    ("mamba2", lambda: tf.Mamba2Config(), "it has no attention"),
    ("falcon_mamba", lambda: tf.FalconMambaConfig(), "it has no attention"),
    ("rwkv", lambda: tf.RwkvConfig(), "it has no attention"),
    ("xlstm", lambda: tf.xLSTMConfig(), "it has no attention"),
    ("qwen3_next", lambda: tf.Qwen3NextConfig(), "hybrid"),
    ("t5", lambda: tf.T5Config(), "encoder-decoder"),
    ("bloom", lambda: tf.BloomConfig(), "attention interface"),
    ("gpt_oss", lambda: tf.GptOssConfig(), "sliding-window"),
    ("bert", lambda: tf.BertConfig(), "encoder"),
    ("roberta", lambda: tf.RobertaConfig(), "encoder"),
    ("bert-generation", lambda: tf.BertGenerationConfig(), "encoder"),
]


@pytest.mark.parametrize(("name", "make", "reason"), UNSUPPORTED, ids=[u[0] for u in UNSUPPORTED])
def test_a_model_that_tiers_do_not_support_is_refused_by_name(
    name: str, make: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        hf.model_shape(make())
    assert name in str(raised.value) and reason in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        tf.LlamaConfig(),
        tf.Qwen2Config(),
        tf.Qwen3Config(),
        tf.MistralConfig(sliding_window=None),
        tf.Qwen2Config(use_sliding_window=False, sliding_window=4096),
    ],
    ids=lambda config: config.model_type,
)
def test_plain_causal_decoders_are_supported(config: Any) -> None:
    shape = hf.model_shape(config)
    assert shape.heads % shape.kv_heads == 0


def test_a_missing_model_is_one_clear_line() -> None:
    with pytest.raises(InvalidArgument, match="not found") as raised:
        hf.resolve_model("/nowhere/model")
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no config\.json"):
        hf.resolve_model(str(tmp_path))


def test_every_encoder_that_transformers_would_run_as_a_decoder_is_refused() -> None:
    masked = {config: name for config, name in tf.MODEL_FOR_MASKED_LM_MAPPING.items()}
    kinds = []
    for config_class in tf.MODEL_FOR_CAUSAL_LM_MAPPING:
        if config_class in masked and getattr(config_class, "is_decoder", True) is False:
            with pytest.raises(UnsupportedModel):
                hf.model_shape(config_class())
            kinds.append(config_class.model_type)
    assert "bert" in kinds and len(kinds) > 10


@pytest.mark.parametrize("text", ["dynamic:2", "linear", "yarn:0", "linear:nan", "yarn:-1"])
def test_rope_scaling_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="rope scaling"):
        hf._scale_rope(tf.LlamaConfig(), text)


def test_rope_scaling_extends_the_trained_length_and_changes_the_namespace(
    tmp_path: Path,
) -> None:
    plain, scaled = tf.LlamaConfig(), tf.LlamaConfig()
    hf._scale_rope(scaled, "yarn:4")
    shapes = hf.model_shape(plain), hf.model_shape(scaled)
    assert shapes[1].trained_tokens == 4 * shapes[0].trained_tokens
    digests = {
        hf.namespace_for(tmp_path, shape, DType.FLOAT32, CodecId.RAW, 256).digest()
        for shape in shapes
    }
    assert len(digests) == 2


def test_weights_digest_sees_one_changed_byte(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3_000_000))
    before = hf.weights_digest(tmp_path)
    changed = bytearray(3_000_000)
    changed[2_999_999] = 1
    file.write_bytes(changed)
    assert hf.weights_digest(tmp_path) != before


@pytest.mark.parametrize("kind", ["gptj", "gpt2", "opt"])
def test_positions_that_cannot_be_scaled_are_not_scaled_without_a_word(kind: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    with pytest.raises(InvalidArgument, match=f"{kind}: its positions cannot be scaled"):
        hf._scale_rope(config, "yarn:4")
