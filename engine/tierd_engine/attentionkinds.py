"""Which attention tiers support: plain causal MHA or GQA; the rest is refused by name.

One rule for two sources: config.json as it lies on disk, where defaults are
not told, and transformers' config, where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Families that transformers can run as decoders and that are encoders unless their config says so.
ENCODERS = frozenset(
    {
        "albert", "bert", "bert-generation", "big_bird", "camembert", "convbert",
        "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm",
        "flaubert", "fnet", "longformer", "megatron-bert", "mobilebert", "modernbert", "mpnet",
        "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
_ENCODER_DECODERS = frozenset({"bart", "mbart", "mt5", "pegasus", "t5", "umt5"})
# Families of which no layer attends: what they keep of a text is a state of one size.
_STATE_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"})
_STATE_LAYERS = frozenset({"linear_attention", "mamba", "recurrent"})
_RECURRENT_LAYERS = _STATE_LAYERS | {"conv", "moe"}
_RECURRENT_FIELDS = (
    "mamba_d_state", "ssm_state_size", "state_size", "attn_layer_indices", "attn_layer_period",
    "lru_width", "linear_num_value_heads",
)  # fmt: skip
# Of these families a window that is set is used; others have a switch beside it.
_ALWAYS_SLIDING = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "ministral"})
NO_INTERFACE = "its attention does not go through transformers' attention interface"
# What `unsupported_reason` asks for.
FIELDS = (
    "model_type", "is_decoder", "is_encoder_decoder", "kv_lora_rank", "layer_types",
    *_RECURRENT_FIELDS, "sliding_window", "use_sliding_window", "attention_chunk_size",
    "attn_logit_softcapping", "text_config", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


def unsupported_reason(field: Callable[[str], Any], *, resolved: bool = False) -> str | None:
    """Return why a model's attention is not plain causal MHA or GQA, or None.

    `field` returns a config's field, or None where it has none. `resolved`:
    the defaults of the model's family have been filled in, so that what is
    not there is not meant.
    """
    kind = field("model_type")
    if kind in ENCODERS and not field("is_decoder"):
        return "it is an encoder"
    if field("is_encoder_decoder") or kind in _ENCODER_DECODERS:
        return "it is an encoder-decoder"
    if field("kv_lora_rank"):
        return "it uses multi-head latent attention (MLA)"
    kinds = _layer_kinds(field("layer_types"))
    if kind in _STATE_ONLY or str(kind).startswith("rwkv") or (kinds and kinds <= _STATE_LAYERS):
        return "it has no attention: it is a recurrent (state-space) model"
    if kinds & _RECURRENT_LAYERS or any(field(name) for name in _RECURRENT_FIELDS):
        return "it is a hybrid of attention and recurrent layers"
    if "sliding_attention" in kinds or _slides(field, resolved):
        return "it uses sliding-window attention"
    if kinds - {"full_attention"}:
        return f"it uses layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
    if field("attention_chunk_size"):
        return "it uses chunked attention"
    if field("attn_logit_softcapping"):
        return "it caps attention logits"
    if field("text_config") is not None:
        return "it is a multimodal model"
    for name in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(field(name), (list, tuple)):
            return "its heads differ from layer to layer"
    return None


def _layer_kinds(value: Any) -> set[str]:
    return {str(kind) for kind in value} if isinstance(value, (list, tuple)) else set()


def _slides(field: Callable[[str], Any], resolved: bool) -> bool:
    if not field("sliding_window"):
        return False
    switch = field("use_sliding_window")
    if switch is None:
        return resolved or field("model_type") in _ALWAYS_SLIDING
    return bool(switch)
