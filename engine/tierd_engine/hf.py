"""Hugging Face models: which run, how they are loaded, and their KV's geometry.

Models are read from the local disk only; no code of theirs is run.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierd.errors import InvalidArgument, UnsupportedModel
from tierd.types import CodecId, DType, Geometry, Namespace
from tierd_engine.attentionkinds import FIELDS, NO_INTERFACE, unsupported_reason
from tierd_engine.gguf import converted_gguf
from tierd_engine.jobcheck import unscalable
from tierd_engine.loading import reading, require_whole
from tierd_engine.modelcheck import (
    NUMBERS,
    PACKAGED_MODEL,
    check_config,
    check_folder,
    check_tokenizer_files,
    locate_model,
    number_problem,
)
from tierd_engine.weightonly import Weights
from tierd_engine.weights import weights_digest

__all__ = [
    "PACKAGED_MODEL",
    "ModelShape",
    "changed_digest",
    "check_token_ids",
    "load_config",
    "load_model",
    "load_tokenizer",
    "model_shape",
    "namespace_for",
    "resolve_model",
    "scaled_rope",
    "stop_token_ids",
    "weights_digest",
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's config matters to tiers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    trained_tokens: int
    rope: str

    @property
    def scales(self) -> bool:
        """Whether --rope-scaling means anything to this model's positions."""
        return self.rope != repr([])

    def geometry(self, dtype: DType, block_tokens: int) -> Geometry:
        """Return the geometry of this model's KV."""
        return Geometry(self.layers, self.kv_heads, self.head_dim, dtype, block_tokens)


def resolve_model(name: str) -> Path:
    """Return a folder in Hugging Face layout for a folder, a .gguf file or a packaged name.

    A folder is checked as far as is possible without torch; a .gguf file is
    converted. Raises InvalidArgument, UnsupportedModel or StorageError, one line.
    """
    path = locate_model(name)
    if path.is_file():
        return converted_gguf(path, model_shape)
    check_folder(path)
    return path


def load_config(folder: Path, rope_scaling: str | None = None) -> Any:
    """Return the model's config, with rope scaling applied.

    Raises InvalidArgument, UnsupportedModel.
    """
    from transformers import AutoConfig

    check_config(folder)
    with reading(f"cannot read {folder / 'config.json'}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if rope_scaling is not None:
        _scale_rope(config, rope_scaling)
    return config


def _scale_rope(config: Any, text: str) -> None:
    kind, _, factor_text = text.partition(":")
    try:
        factor = float(factor_text)
    except ValueError:
        factor = 0.0
    # "dynamic" changes the rotation of keys that are already stored as the context grows.
    if kind not in ("linear", "yarn") or not 1.0 <= factor <= 1024.0:
        raise InvalidArgument(
            f"rope scaling {text!r} is not understood; write linear:FACTOR or yarn:FACTOR"
        )
    trained = int(getattr(config, "max_position_embeddings", 0) or 0)
    if not trained:
        raise InvalidArgument("the model's config tells no trained length to scale from")
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if not parameters:
        raise unscalable(config.model_type)
    parameters.update(rope_type=kind, factor=factor)
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = trained
    config.rope_parameters = parameters
    config.max_position_embeddings = int(trained * factor)


def scaled_rope(config: Any, text: str) -> str:
    """Return what a shape's `rope` is with --rope-scaling `text`. Raises InvalidArgument."""
    scaled = copy.copy(config)
    _scale_rope(scaled, text)
    return _rope_of(scaled)


def _rope_of(config: Any) -> str:
    return repr(sorted((getattr(config, "rope_parameters", None) or {}).items()))


def model_shape(config: Any) -> ModelShape:
    """Return the shape of a model that tiers support.

    Raises UnsupportedModel by name, InvalidArgument for numbers that cannot be.
    """
    name = getattr(config, "model_type", type(config).__name__)
    with reading(f"model {name}: its config cannot be understood"):
        fields = {field: getattr(config, field, None) for field in (*FIELDS, *NUMBERS)}
    reason = unsupported_reason(fields.get, resolved=True) or _lacks_interface(config)
    if reason is not None:
        raise UnsupportedModel(f"model {name}: {reason}; tiers do not support it yet")
    problem = number_problem(fields)
    if problem is not None:
        raise InvalidArgument(f"model {name}: {problem}")
    heads = int(config.num_attention_heads)
    head_dim = fields["head_dim"] or config.hidden_size // heads
    return ModelShape(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(fields["num_key_value_heads"] or heads),
        head_dim=int(head_dim),
        trained_tokens=int(fields["max_position_embeddings"] or 0),
        rope=_rope_of(config),
    )


def _lacks_interface(config: Any) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return "it is not a causal decoder"
    if not getattr(model_class, "_supports_attention_backend", False):
        return NO_INTERFACE
    return None


def load_model(folder: Path, config: Any, dtype: DType) -> Any:
    """Return the model, in `dtype`, on the CPU, for inference.

    Raises InvalidArgument if the weights cannot be read or are not the config's.
    """
    from transformers import AutoModelForCausalLM

    from tierd_engine import cache

    with reading(f"cannot load {folder}"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype.value),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    require_whole(info, folder)
    model.eval()
    model.config._attn_implementation = cache.ATTENTION_NAME
    return model


def load_tokenizer(folder: Path) -> Any:
    """Return the model's tokenizer. Raises InvalidArgument."""
    from transformers import AutoTokenizer

    check_tokenizer_files(folder)
    with reading(f"no usable tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def check_token_ids(config: Any, token_ids: list[int]) -> None:
    """Raise InvalidArgument if a tokenizer gave a token that the model does not have."""
    largest, rows = max(token_ids, default=0), getattr(config, "vocab_size", None)
    if rows is not None and largest >= rows:
        raise InvalidArgument(
            f"the tokenizer is another model's: it gives token {largest}, "
            f"and the model has {rows} tokens"
        )


def namespace_for(
    folder: Path,
    shape: ModelShape,
    dtype: DType,
    codec: CodecId,
    block_tokens: int,
    codec_layers: str = "",
    weights: Weights = Weights.AUTO,
) -> Namespace:
    """Return the namespace of this model's KV. Weights that are changed give other KV."""
    return Namespace(
        geometry=shape.geometry(dtype, block_tokens),
        weights_digest=changed_digest(weights_digest(folder), weights),
        codec=codec,
        codec_layers=codec_layers,
        rope=shape.rope,
    )


def changed_digest(digest: str, weights: Weights) -> str:
    """Return the digest of weights that are kept otherwise than their files have them."""
    return digest if weights is Weights.AUTO else f"{digest}:{weights}"


def stop_token_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Return the token ids that end an answer, of the generation config and the tokenizer."""
    from transformers import GenerationConfig

    ids: set[int] = set()
    if (folder / "generation_config.json").is_file():
        with reading(f"cannot read {folder / 'generation_config.json'}"):
            eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        ids.update(eos if isinstance(eos, list) else [eos])
    ids.add(tokenizer.eos_token_id)
    return {token for token in ids if token is not None}
