import subprocess
import sys

import pytest

import phalanx


def test_import_is_light() -> None:
    code = "import sys, phalanx; print([m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'LLMM'.*\bLLM\b"):
        _ = phalanx.LLMM


def test_dir_lists_the_public_names() -> None:
    assert set(phalanx.__all__) <= set(dir(phalanx))
