"""The committed stubs are what the committed contract gives."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROTO = "tierd/rpc/v1/tierd.proto"


def test_the_stubs_are_up_to_date(tmp_path: Path) -> None:
    options = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(ROOT / "proto"),
        *options,
        PROTO,
    ]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    written = sorted(tmp_path.rglob("*.py*"))
    assert len(written) == 3
    for file in written:
        committed = ROOT / file.relative_to(tmp_path)
        assert committed.read_text() == file.read_text(), f"run scripts/proto: {committed.name}"


def test_the_stubs_import_on_the_protobuf_that_is_promised() -> None:
    source = (ROOT / "tierd/rpc/v1/tierd_pb2.py").read_text()
    assert "Protobuf Python Version: 6.31" in source


@pytest.mark.parametrize("enum", ["Codec", "DType", "SessionState", "HintOutcome"])
def test_zero_is_unspecified(enum: str) -> None:
    from tierd.rpc.v1 import tierd_pb2 as pb

    assert pb.DESCRIPTOR.enum_types_by_name[enum].values_by_number[0].name.endswith("_UNSPECIFIED")
