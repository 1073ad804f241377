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
from tierd_engine import hf, jobcheck
from tierd_engine.ggufheader import read_integers
from tierd_engine.jobcheck import Request, check_length, check_request

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


def later_refusal(path: Path, rope_scaling: str | None = None) -> str:
    """Return what is said once torch and transformers are there."""
    with pytest.raises(TierdError) as raised:
        hf.model_shape(hf.load_config(path, rope_scaling))
    return str(raised.value)


def of_kind(folder: Path, tmp_path: Path, kind: str, **fields: Any) -> Path:
    """Return a copy of a model whose config is a family's own, as transformers writes it."""
    from transformers import AutoConfig

    path = changed(folder, tmp_path)
    (path / "config.json").unlink()
    AutoConfig.for_model(kind, **fields).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bloom", {}), ("falcon", {"alibi": True}), ("falcon", {"alibi": False}), ("mpt", {}),
        ("gpt_neo", {}), ("stablelm", {}),
    ],
)  # fmt: skip
def test_attention_of_its_own_is_refused_at_once_in_the_same_words(
    folder: Path, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    path = of_kind(folder, tmp_path, kind, **fields)
    said = refusal(path)
    assert "does not go through transformers' attention interface" in said
    assert said == later_refusal(path)


def test_only_kinds_whose_decoder_lacks_the_interface_are_refused_for_it() -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    refused = [kind for kind in NAMES if jobcheck._attends_by_itself(kind)]
    assert len(refused) > 20
    for kind in refused:
        decoder = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(AutoConfig.for_model(kind)), None)
        assert not getattr(decoder, "_supports_attention_backend", False), kind
    assert jobcheck._attends_by_itself("unheard_of") is None
    assert jobcheck._attends_by_itself("../llama") is None


@pytest.mark.parametrize(
    "kind", ["gpt2", "gpt-sw3", "gpt_bigcode", "gptj", "codegen", "ctrl", "opt"]
)
def test_positions_that_cannot_be_scaled_are_refused_at_once_in_the_same_words(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    path = of_kind(folder, tmp_path, kind, max_position_embeddings=128)
    shape = hf.model_shape(hf.load_config(path))
    assert (shape.trained_tokens, shape.scales) == (128, False)
    said = refusal(path, document="word", max_new_tokens=127)
    with pytest.raises(InvalidArgument) as later:
        check_length(128, 2, 127, is_least=True, scales=shape.scales)
    assert said == str(later.value) and "--rope-scaling" not in said
    assert refusal(path, rope_scaling="linear:4") == later_refusal(path, "linear:4")
    check_request(str(path), replace(REQUEST, document="word", max_new_tokens=64))


def test_a_family_whose_config_tells_of_scaling_passes(folder: Path, tmp_path: Path) -> None:
    path = changed(folder, tmp_path, model_type="opt")
    assert hf.model_shape(hf.load_config(path, "linear:4")).trained_tokens == 4 * TRAINED
    check_request(str(path), replace(REQUEST, rope_scaling="linear:4", max_new_tokens=2 * TRAINED))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mamba", "it has no attention"), ("bloom", "attention interface"), ("bert", "an encoder")],
)
def test_a_gguf_of_such_a_kind_is_refused_at_once(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "m.gguf"
    data = tiny_gguf(path).read_bytes()
    # An architecture of another length would move everything: the keys' names are changed alone.
    key = b"llama.block_count"
    name = kind.encode() + b".block_count"
    old, new = (len(text).to_bytes(8, "little") + text for text in (key, name))
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with pytest.raises(UnsupportedModel, match=f"model {kind}: .*{words}"):
        check_request(str(path), REQUEST)


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


def test_a_document_that_is_far_too_long_is_refused_after_its_beginning(
    folder: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierd_engine import prompt
    from tierd_engine.runner import JobSpec, prepare_job

    read, plain_ids = [0], prompt.plain_ids

    def counted(tokenizer: Any, text: str) -> list[int]:
        read[0] += len(text)
        return plain_ids(tokenizer, text)

    monkeypatch.setattr(prompt, "plain_ids", counted)
    document = "word " * 2_000_000
    for model in (folder, gguf):
        with pytest.raises(InvalidArgument, match=r"at least .* that the model was trained for"):
            prepare_job(JobSpec(str(model), document, "Why?"))
        job = prepare_job(JobSpec(str(model), document, "Why?", context_tokens=TRAINED - 200))
        assert len(job.prompt_ids) == TRAINED - 200
    assert read[0] < len(document) // 10
