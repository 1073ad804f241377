"""The GPU's kernels run in Triton's interpreter here; without Triton their tests are skipped."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import


class _Untried(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("Triton is not installed: pip install '.[dev]'", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if importlib.util.find_spec("triton") is not None:
        return None
    return _Untried.from_parent(parent, path=module_path)
