"""Compiling the kernels: cached, safe beside others, and absent without harm."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from phalanx.ops import registry
from phalanx.ops.cpu import compiler
from phalanx.ops.cpu import library as library_module
from phalanx.ops.linear import linear, prepare_linear

needs_compiler = pytest.mark.skipif(library_module.library() is None, reason="no C++ compiler")


@pytest.fixture
def forgotten(monkeypatch):
    """As in a fresh process: nothing is loaded, nothing chosen; put back afterwards."""

    def forget():
        library_module.library.cache_clear()
        for op in registry._TABLE.values():
            op.chosen.clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture
def one_small_source(monkeypatch, tmp_path):
    """Sources that compile at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(compiler, "SOURCES", sources)
    return sources


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("reason", ["absent", "broken"])
def test_without_a_compiler_plain_pytorch_stands_in(monkeypatch, caplog, tmp_path, reason):
    if reason == "absent":
        monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    else:
        fake = tmp_path / "fake-compiler"
        fake.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
        fake.chmod(0o755)
        monkeypatch.setattr(compiler, "COMPILERS", (str(fake),))
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        weight = torch.randn(5, 7)
        prepared = prepare_linear(weight)
        x = torch.randn(3, 7)
        assert prepared.layout == "plain"
        assert torch.equal(linear(x, prepared), x @ weight.T)
        for op in ("attention", "rope_write_kv", "rms_norm", "add_rms_norm", "gated_activation"):
            assert "reference" in registry.select(op, device="cpu", dtype=torch.float32).__name__
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "native CPU kernels are not available" in messages[0]
    assert ("no-such-compiler" if reason == "absent" else "broken") in messages[0]
    with pytest.raises(ValueError, match=r"'native' does not support torch.float32 on cpu; those that do: reference"):
        registry.select("attention", device="cpu", dtype=torch.float32, forced="native")


@needs_compiler
def test_compiled_once_and_again_when_a_source_changes(one_small_source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = compiler.compiled_library(cache)
    stamp = first.stat().st_mtime_ns
    assert compiler.compiled_library(cache) == first and first.stat().st_mtime_ns == stamp
    (one_small_source / "small.cpp").write_text('extern "C" int answer() { return 43; }\n')
    second = compiler.compiled_library(cache)
    assert second != first
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DOTHER"))
    assert compiler.compiled_library(cache) not in (first, second)


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_several_compile_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: compiler.compiled_library(tmp_path / "cache"), range(4)))
    assert len(paths) == 1
    path = paths.pop()
    assert sorted((tmp_path / "cache").iterdir()) == [path.with_suffix(".sha256"), path]


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    path = compiler.compiled_library(tmp_path / "file" / "cache")
    assert path.exists() and Path(path).parent.stat().st_mode & 0o077 == 0


@needs_compiler
@pytest.mark.usefixtures("one_small_source")
def test_a_library_that_is_not_whole_is_compiled_again(tmp_path):
    path = compiler.compiled_library(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    assert compiler.compiled_library(tmp_path) == path
    assert len(path.read_bytes()) == len(whole)
