"""Jobs that cannot be, told from a model's config and header alone: before torch is imported.

What is refused here would be refused later too (`prepare_job`), seconds on. Where a file leaves
something open it passes.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tierd.codec.layout import page_layout
from tierd.errors import InvalidArgument, UnsupportedModel
from tierd.layercodecs import parse_codec_choice
from tierd.types import BLOCK_TOKENS_MIN, DType, Geometry
from tierd_engine.attentionkinds import NO_INTERFACE, unsupported_reason
from tierd_engine.ggufheader import read_integers
from tierd_engine.modelcheck import (
    HEADS,
    HIDDEN,
    LAYERS,
    check_model,
    first_number,
    read_json_object,
)

CODEC_DEFAULT = "int8"
# Families whose positions are learned, or rotated at one fixed rate: none can be scaled.
_UNSCALABLE = frozenset({"gpt2", "gpt-sw3", "gpt_bigcode", "gptj", "codegen", "ctrl", "opt"})
# Families whose heads are hidden_size / heads where their config names no head_dim.
_PLAIN_HEADS = _UNSCALABLE | {"llama", "mistral", "qwen2", "phi3", "gpt_neox", "granite", "olmo"}
# Where a config tells the trained length; of two the longer counts.
_TRAINED = ("max_position_embeddings", "n_positions")
# A document is tokenised here only where it may be too long: English has four bytes a token.
_BYTES_PER_TOKEN_MAX, _BYTES_PER_TOKEN_LEAST = 8, 3
_EDGE_TOKENS = 16  # a text that is cut, or framed, may have so many fewer


@dataclass(frozen=True, slots=True)
class Request:
    """What of a job its model may not allow. `document` None: a session is resumed, and its
    codec and length are the daemon's to tell."""

    document: str | None
    codec: str | None
    context_tokens: int | None
    max_new_tokens: int
    rope_scaling: str | None


@dataclass(frozen=True, slots=True)
class _Told:
    """What a model's files tell of it; None: nothing."""

    layers: int | None
    head_dim: int | None
    trained_tokens: int | None
    kind: str = ""
    scales: bool = True


def check_request(model: str, request: Request) -> None:
    """Raise InvalidArgument or UnsupportedModel, one line, for a job that this model cannot run.

    `model` is what a user writes: a folder, a .gguf file or a packaged name.
    """
    path = check_model(model)
    told = _of_gguf(path) if path.is_file() else _of_config(path)
    if request.document is not None:
        _check_codecs(request.codec or CODEC_DEFAULT, told)
    if told.trained_tokens:
        trained = told.trained_tokens
        if request.rope_scaling is not None:
            if not told.scales:
                raise unscalable(told.kind)
            trained = int(trained * float(request.rope_scaling.partition(":")[2]))
        context = _context_at_least(path, request, trained)
        is_least = context != request.context_tokens
        check_length(
            trained, context, request.max_new_tokens, is_least=is_least, scales=told.scales
        )


def unscalable(kind: str) -> InvalidArgument:
    """Return the refusal of --rope-scaling for a kind of model to which it means nothing."""
    return InvalidArgument(f"model {kind}: its positions cannot be scaled (--rope-scaling)")


def check_length(
    trained_tokens: int, context_tokens: int, max_new_tokens: int, *, is_least: bool = False,
    scales: bool = True,
) -> None:  # fmt: skip
    """Raise InvalidArgument if the job runs past the length the model was trained for (0: any).

    `is_least`: the context may be longer. `scales`: the model's positions can be scaled.
    """
    total = context_tokens + max_new_tokens
    if trained_tokens and total > trained_tokens:
        raise InvalidArgument(
            f"{'at least ' * is_least}{context_tokens} tokens of context and {max_new_tokens} new "
            f"ones are more than the {trained_tokens} tokens that the model was trained for; "
            "shorten them" + " or give --rope-scaling linear:FACTOR or yarn:FACTOR" * scales
        )


def _check_codecs(text: str, told: _Told) -> None:
    choice = parse_codec_choice(text)
    codecs = {choice.base} if told.layers is None else set(choice.per_layer(told.layers))
    if told.head_dim is not None:
        geometry = Geometry(1, 1, told.head_dim, DType.FLOAT32, BLOCK_TOKENS_MIN)
        for codec in sorted(codecs):
            page_layout(geometry, codec)


def _context_at_least(path: Path, request: Request, trained_tokens: int) -> int:
    """Return how many tokens the prompt has at least, as far as it takes to see it too long."""
    if request.document is None:
        return 0
    least = 2  # one of the document, one of the question
    wanted = request.context_tokens
    if wanted is not None and wanted + request.max_new_tokens <= trained_tokens:
        return least
    if len(request.document) // _BYTES_PER_TOKEN_LEAST + request.max_new_tokens <= trained_tokens:
        return least
    enough = trained_tokens + 2 * _EDGE_TOKENS if wanted is None else wanted + 2 * _EDGE_TOKENS
    found = _tokens(path, request.document[: enough * _BYTES_PER_TOKEN_MAX]) - _EDGE_TOKENS
    return max(least, found if wanted is None else min(wanted, found))


def _tokens(path: Path, text: str) -> int:
    """Return how many tokens a text has; 0 where only transformers could tell."""
    file = path / "tokenizer.json"
    if not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return 0
    from tokenizers import Tokenizer

    try:
        return len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)
    except Exception as error:  # what tokenizers raises is of this very class
        raise InvalidArgument(f"no usable tokenizer in {path}: {error}") from error


def _of_config(folder: Path) -> _Told:
    config = read_json_object(folder / "config.json")
    kind = str(config.get("model_type"))
    _refuse(kind, _unknown_to_transformers(kind) or _attends_by_itself(kind))
    heads, hidden = first_number(config, HEADS), first_number(config, HIDDEN)
    head_dim = config.get("head_dim")
    if head_dim is None and kind in _PLAIN_HEADS and heads and hidden:
        head_dim = hidden // heads
    trained = max(config.get(name) or 0 for name in _TRAINED)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    scales = kind not in _UNSCALABLE or bool(rope)
    return _Told(first_number(config, LAYERS), head_dim, trained, kind, scales)


def _of_gguf(path: Path) -> _Told:
    found = read_integers(path)

    def ending(name: str) -> int | None:
        return next((value for key, value in found.items() if key.endswith(name)), None)

    head_dim = ending(".attention.key_length")
    hidden, heads = ending(".embedding_length"), ending(".attention.head_count")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    # Every key of a model's begins with its architecture, which is transformers' kind or unknown.
    kind = next((key.partition(".")[0] for key in found if key.endswith(".block_count")), "")
    _refuse(kind, unsupported_reason({"model_type": kind}.get) or _attends_by_itself(kind))
    layers, trained = ending(".block_count"), ending(".context_length")
    return _Told(layers, head_dim, trained, kind, kind not in _UNSCALABLE)


def _refuse(kind: str, reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedModel(f"model {kind}: {reason}; tiers do not support it yet")


def _unknown_to_transformers(kind: str) -> str | None:
    """Return why a kind of model has no decoder in the transformers that is here, or None.

    Its tables are read as text: to import them takes seconds. Where they are not as they are
    looked for, or were added to since, it passes.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "models" / "auto"
    configs = _table(folder / "auto_mappings.py", "CONFIG_MAPPING_NAMES")
    decoders = _table(folder / "modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if not configs or not decoders or kind in decoders:
        return None
    if kind not in configs:
        later = folder / "configuration_auto.py"
        added = later.is_file() and f'"{kind}"' in later.read_text(encoding="utf-8")
        return None if added else "transformers does not know it"
    # Kinds that share a config are one model to it.
    classes = {configs[decoder] for decoder in decoders if decoder in configs}
    return None if configs[kind] in classes else "it is not a causal decoder"


def _attends_by_itself(kind: str) -> str | None:
    """Return why a kind's decoder attends past the interface that tiers stand behind, or None.

    A family that supports it says so on its base class, in the one file of its models.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None or not kind.isidentifier():
        return None
    file = Path(spec.origin).parent / "models" / kind / f"modeling_{kind}.py"
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    has_base = re.search(r"^class \w+PreTrainedModel\(PreTrainedModel", source, re.MULTILINE)
    return NO_INTERFACE if has_base and "_supports_attention_backend" not in source else None


@lru_cache(maxsize=2)
def _table(file: Path, name: str) -> dict[str, Any]:
    """Return the pairs of a module's `name = OrderedDict([...])`; none if there is no such."""
    try:
        module = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name
            and isinstance(node.value, ast.Call)
            and node.value.args
        ):
            try:
                return dict(ast.literal_eval(node.value.args[0]))
            except (ValueError, TypeError):
                return {}
    return {}
