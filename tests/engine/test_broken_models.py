"""Broken model folders: whatever transformers would raise or pass over is one clear line."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.folders import tiny_config, tiny_folder
from tierd.errors import InvalidArgument, UnsupportedModel
from tierd.types import DType
from tierd_engine import hf
from tierd_engine.loading import cause_line, reading
from tierd_engine.prompt import build_followup, build_prompt

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def use(folder: Path) -> list[int]:
    """Do with a model all that a job does with its files, and return a prompt's ids."""
    found = hf.resolve_model(str(folder))
    config = hf.load_config(found)
    hf.model_shape(config)
    tokenizer = hf.load_tokenizer(found)
    ids = build_prompt(tokenizer, "a document", "a question?", None).token_ids
    build_followup(tokenizer, "and?")
    hf.check_token_ids(config, ids)
    model = hf.load_model(found, config, DType.FLOAT32)
    assert not model.training
    hf.stop_token_ids(found, tokenizer)
    return ids


def change(name: str, **fields: Any) -> Damage:
    """Return a damage that sets fields of a JSON file."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return apply


def write(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Return a damage that rewrites the weights."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def test_a_whole_model_is_read(folder: Path) -> None:
    assert max(use(folder)) < tiny_config().vocab_size


MISMATCHES: list[tuple[Damage, str]] = [
    (change("config.json", num_hidden_layers=1), r"9 unexpected \(as model.layers.1"),
    (change("config.json", num_hidden_layers=4), r"18 missing \(as model.layers.2"),
    (change("config.json", intermediate_size=65), r"6 of another shape \(as model.layers.0"),
    (change("config.json", vocab_size=300), r"2 of another shape \(as lm_head.weight"),
    (change("config.json", attention_bias=True), r"8 missing"),
    (change("config.json", model_type="gpt2"), r"\d+ missing .*\d+ unexpected"),
    (change("config.json", model_type="qwen2"), r"6 missing"),
    (weights(lambda t: t.pop("lm_head.weight")), r"1 missing \(as lm_head.weight\)"),
    (weights(lambda t: t.update(odd=torch.zeros(3))), r"1 unexpected \(as odd\)"),
    (weights(lambda t: t.clear()), r"21 missing"),
]


@pytest.mark.parametrize(("damage", "pattern"), MISMATCHES, ids=[m[1] for m in MISMATCHES])
def test_weights_that_are_not_the_configs_are_refused_with_counts_and_an_example(
    folder: Path, damage: Damage, pattern: str
) -> None:
    damage(folder)
    config = hf.load_config(folder)
    with pytest.raises(InvalidArgument, match=f"do not match its config: tensors .*{pattern}"):
        hf.load_model(folder, config, DType.FLOAT32)


BROKEN: dict[str, Damage] = {
    "weights-empty": write("model.safetensors", b""),
    "weights-random": write("model.safetensors", bytes(range(256)) * 64),
    "weights-odd-dtype": lambda f: write(
        "model.safetensors",
        (f / "model.safetensors").read_bytes().replace(b'"F32"', b'"Q99"'),
    )(f),
    "weights-shape-lies": lambda f: write(
        "model.safetensors",
        (f / "model.safetensors").read_bytes().replace(b"[32,32]", b"[32,31]"),
    )(f),
    "config-cut": write("config.json", b'{"model_type": "llama"'),
    "config-no-type": write("config.json", b"{}"),
    "kind-unknown": change("config.json", model_type="unheard_of"),
    "kind-remote": change("config.json", model_type="own", auto_map={"AutoConfig": "code.Config"}),
    "kv-heads-0": change("config.json", num_key_value_heads=0),
    "kv-heads-3": change("config.json", num_key_value_heads=3),
    "hidden-33": change("config.json", hidden_size=33, head_dim=None),
    "hidden-text": change("config.json", hidden_size="x"),
    "eps-text": change("config.json", rms_norm_eps="x"),
    "act-unknown": change("config.json", hidden_act="nope"),
    "rope-unknown": change("config.json", rope_parameters={"rope_type": "nope"}),
    "rope-text": change("config.json", rope_parameters="x"),
    "rope-theta-text": change(
        "config.json", rope_parameters={"rope_type": "default", "rope_theta": "x"}
    ),
    "quantised-gptq": change(
        "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
    ),
    "tokenizer-cut": write("tokenizer.json", b'{"version": "1.0", "model"'),
    "tokenizer-empty": write("tokenizer.json", b""),
    "tokenizer-odd": write("tokenizer.json", b'{"model": {"type": "Nope"}}'),
    "tokenizer-config-cut": write("tokenizer_config.json", b"{"),
    "tokenizer-length-text": change("tokenizer_config.json", model_max_length="x"),
    "template-syntax": write("chat_template.jinja", b"{% for %}"),
    "template-undefined": write("chat_template.jinja", b"{{ nothing.at.all }}"),
    "template-raises": write("chat_template.jinja", b"{{ raise_exception('no') }}"),
    "template-drops-text": write("chat_template.jinja", b"hello"),
    "template-not-utf8": write("chat_template.jinja", b"\xff\xfe"),
    "generation-cut": write("generation_config.json", b"{"),
    "generation-eos-text": change("generation_config.json", eos_token_id="</s>"),
    "no-tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "no-weights": lambda f: (f / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_clear_line(folder: Path, name: str) -> None:
    BROKEN[name](folder)
    with pytest.raises(InvalidArgument) as raised:
        use(folder)
    message = str(raised.value)
    assert message and "\n" not in message and not message.endswith((":", ","))


def test_an_encoder_is_refused_by_name(folder: Path) -> None:
    change("config.json", model_type="bert")(folder)
    with pytest.raises(UnsupportedModel, match="model bert: it is an encoder"):
        hf.resolve_model(str(folder))


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    config = tiny_config(vocab_size=257)
    ids = build_prompt(hf.load_tokenizer(folder), "a", "b", None).token_ids
    with pytest.raises(InvalidArgument, match="another model's"):
        hf.check_token_ids(config, ids)


def test_rope_that_has_no_trained_length_cannot_be_scaled(folder: Path) -> None:
    change("config.json", max_position_embeddings=None)(folder)
    with pytest.raises(InvalidArgument):
        hf.load_config(folder, "yarn:2")


def test_too_little_memory_and_missing_packages_are_not_called_broken_files() -> None:
    for error in (MemoryError("a"), ModuleNotFoundError("b", name="accelerate")):
        with pytest.raises(type(error)), reading("cannot read it"):
            raise error
    with pytest.raises(RuntimeError, match="start new thread"), reading("cannot read it"):
        raise RuntimeError("can't start new thread")
    for short in (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ):
        with pytest.raises(MemoryError), reading("cannot read it"):
            raise short
    with pytest.raises(KeyboardInterrupt), reading("cannot read it"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  any of:\n(1) this,\n(2) that\nthree"), "any of: (1) this, (2) that"),
        (ValueError(), "ValueError"),
        (KeyError("scores"), "'scores' is missing or not known"),
    ],
)
def test_a_cause_is_told_in_one_line_that_is_not_cut(error: Exception, line: str) -> None:
    assert cause_line(error) == line
