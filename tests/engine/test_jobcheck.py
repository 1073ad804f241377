"""Jobs that a model cannot run are refused from its files alone: no torch, no transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.folders import tiny_folder, tiny_gguf
from tierd.errors import InvalidArgument, TierdError, UnsupportedModel
from tierd_engine import jobcheck
from tierd_engine.ggufheader import read_integers
from tierd_engine.jobcheck import Request, check_request

TRAINED = 4096  # tokens; a token is a byte of text
REQUEST = Request("word " * 200, "int8", None, 64, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "m", head_dim=40)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def refusal(model: Path, **changes: Any) -> str:
    with pytest.raises(TierdError) as raised:
        check_request(str(model), replace(REQUEST, **changes))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_can_be_passes(folder: Path, gguf: Path) -> None:
    for model in (folder, gguf):
        for codec in (None, "raw", "int8,layers:1=fp8"):
            check_request(str(model), replace(REQUEST, codec=codec))


@pytest.mark.parametrize("codec", ["int4", "k8v4", "int8,layers:1=k8v4"])
def test_a_codec_that_cannot_store_the_heads_is_refused_with_those_that_can(
    folder: Path, gguf: Path, codec: str
) -> None:
    said = refusal(folder, codec=codec)
    assert "head_dim is 40 here: choose raw, int8 or fp8" in said
    assert "head_dim is 8 here" in refusal(gguf, codec=codec)
    check_request(str(folder), replace(REQUEST, codec=codec, document=None))  # its session's holds


def test_a_layer_that_the_model_has_not_is_refused(folder: Path) -> None:
    assert "layers 0 to 1" in refusal(folder, codec="int8,layers:2=raw")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": TRAINED},
        {"document": None, "max_new_tokens": TRAINED + 1},
        {"document": "word " * 4000},
        {"document": "word " * 4000, "context_tokens": TRAINED},
        {"document": "word " * 400_000, "rope_scaling": "yarn:4"},
    ],
)
def test_a_job_beyond_the_trained_length_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    assert "that the model was trained for" in refusal(folder, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"document": "word " * 2000, "context_tokens": TRAINED - 64},
        {"context_tokens": 10 * TRAINED},  # the document is shorter: all of it is read
        {"document": "word " * 2000, "rope_scaling": "linear:4"},
        {"document": None, "max_new_tokens": TRAINED - 2},
    ],
)
def test_what_may_yet_fit_passes(folder: Path, changes: dict[str, Any]) -> None:
    check_request(str(folder), replace(REQUEST, **changes))


def changed(folder: Path, tmp_path: Path, **fields: Any) -> Path:
    """Return a copy of a model whose config has other fields."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, **fields}))
    return copy


@pytest.mark.parametrize(
    ("kind", "words"),
    [("llama9000", "transformers does not know it"), ("clip", "not a causal decoder")],
)
def test_a_kind_without_a_decoder_is_refused(
    folder: Path, tmp_path: Path, kind: str, words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_request(str(changed(folder, tmp_path, model_type=kind)), REQUEST)


def test_kinds_pass_where_transformers_has_its_tables_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobcheck, "_table", lambda file, name: {})
    check_request(str(changed(folder, tmp_path, model_type="llama9000")), REQUEST)


def test_only_kinds_without_a_decoder_in_transformers_are_refused() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    decoders = {CONFIG_MAPPING_NAMES.get(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    refused = {kind for kind in CONFIG_MAPPING_NAMES if jobcheck._unknown_to_transformers(kind)}
    assert len(refused) > 100
    assert not {kind for kind in refused if CONFIG_MAPPING_NAMES[kind] in decoders}
    assert not refused & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_head_size_that_the_config_leaves_to_its_family_is_not_guessed(
    folder: Path, tmp_path: Path
) -> None:
    path = changed(folder, tmp_path, model_type="qwen3", head_dim=None)
    check_request(str(path), replace(REQUEST, codec="int4"))


def test_integers_of_a_gguf_header_are_those_that_were_written(gguf: Path) -> None:
    found = read_integers(gguf)
    assert {k.split(".", 1)[1]: found[k] for k in found if k.endswith(("count", "kv"))} == {
        "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2,
        "rope.dimension_count": 8,
    }  # fmt: skip


def test_nothing_heavy_is_imported(folder: Path) -> None:
    script = (
        "import sys; from tierd_engine.jobcheck import Request, check_request; "
        f"check_request({str(folder)!r}, Request('word ' * 900, 'int8', None, 64, None)); "
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_tokenizer_that_is_none_is_one_line(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="no usable tokenizer in"):
        check_request(str(copy), replace(REQUEST, document="word " * 5000))
