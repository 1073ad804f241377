"""A job that asks for other KV than its session holds: a usage error that says what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.folders import tiny_folder
from tierd.errors import InvalidArgument, LayoutMismatch, StaleGeneration, TierdError
from tierd.types import CodecId, DType
from tierd_engine import hf
from tierd_engine.resuming import held_dtype, resume_session
from tierd_engine.runner import JobSpec
from tierd_engine.weightonly import Weights

SESSION = "00000000000000ab"
AS_ASKED = {"dtype": DType.FLOAT32, "weights": Weights.AUTO, "rope": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "m")


def held(
    folder: Path, *, dtype: DType, weights: Weights, rope: str | None, layers: int = 2
) -> dict[str, Any]:
    """Return the daemon's row of a session that was made with these options."""
    shape = hf.model_shape(hf.load_config(folder, rope))
    namespace = hf.namespace_for(folder, shape, dtype, CodecId.INT8, 16, "", weights)
    digest = namespace.digest().hex()
    return {"codec": "int8", "block_tokens": 16, "layers": layers, "namespace": digest}


def asked(folder: Path, row: dict[str, Any], **options: Any) -> DType:
    """Return the dtype in which a job with these options resumes the session of a row."""
    spec = JobSpec(str(folder), "", "More?", resume=SESSION, **options)
    shape = hf.model_shape(hf.load_config(folder, spec.rope_scaling))
    return held_dtype(spec, row, folder, shape)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({}, {}),
        ({"dtype": DType.BFLOAT16}, {}),
        ({"dtype": DType.FLOAT16}, {"dtype": "float16"}),
        ({"weights": Weights.INT8}, {"weights": "int8"}),
        ({"rope": "yarn:3.3"}, {"rope_scaling": "yarn:3.3"}),
        ({"rope": "linear:2"}, {"rope_scaling": "linear:2.0"}),
    ],
)
def test_a_session_is_resumed_with_what_it_was_made_with(
    folder: Path, made: dict[str, Any], options: dict[str, Any]
) -> None:
    made = {**AS_ASKED, **made}
    assert asked(folder, held(folder, **made), **options) is made["dtype"]


@pytest.mark.parametrize(
    ("made", "options", "says"),
    [
        ({"dtype": DType.BFLOAT16}, {"dtype": "float32"}, "made with --dtype bfloat16;"),
        ({"weights": Weights.INT8}, {}, "made with --weights int8;"),
        ({}, {"weights": "int8"}, "made without --weights int8;"),
        ({}, {"rope_scaling": "linear:2"}, "made without --rope-scaling;"),
        ({"rope": "linear:2"}, {}, "made with --rope-scaling linear:2;"),
        ({"rope": "yarn:2.5"}, {"rope_scaling": "linear:2"}, "made with --rope-scaling yarn:2.5;"),
        (
            {"dtype": DType.FLOAT16, "weights": Weights.INT8, "rope": "yarn:4"},
            {"dtype": "bfloat16"},
            "made with --dtype float16 and with --weights int8 and with --rope-scaling yarn:4;",
        ),
        ({"rope": "yarn:77.7"}, {}, "made with another --rope-scaling, with another model than"),
        ({"layers": 3}, {}, "is of another model: that has 3 layers"),
    ],
)
def test_what_differs_is_a_usage_error_that_names_it(
    folder: Path, made: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    row = held(folder, **{**AS_ASKED, **made})
    with pytest.raises(TierdError) as refused:
        asked(folder, row, **options)
    said = str(refused.value)
    assert refused.value.exit_code == 2 and says in said
    assert SESSION in said and "\n" not in said


def test_another_models_session_is_a_usage_error_that_names_the_model(
    folder: Path, tmp_path: Path
) -> None:
    other = tiny_folder(tmp_path / "other", hidden_size=64)
    with pytest.raises(InvalidArgument, match=r"with another model than .*other, or with other"):
        asked(other, held(folder, **AS_ASKED))


@pytest.mark.parametrize("error", [StaleGeneration("is running"), LayoutMismatch("differs")])
def test_a_session_that_became_anothers_meanwhile_is_the_same_usage_error(
    error: TierdError,
) -> None:
    class Client:
        def resume(self, *arguments: Any) -> Any:
            raise error

    with pytest.raises(InvalidArgument, match=str(error)):
        resume_session(Client(), SESSION, None, 1)  # type: ignore[arg-type]
