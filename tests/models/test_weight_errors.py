"""Whatever is wrong with the weights is found before anything is read, and listed in one WeightError."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.engine.build import build_engine
from phalanx.layout import shard_into
from phalanx.models import InferenceParameter, TransformerModel, placement
from phalanx.weights import WeightError
from phalanx.weights.hf_folder import write_hf_folder
from tests.models.tiny import error, llama, llama_config, reference

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sharded(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a file for every tensor, and an index."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    tensors = tiny_llama.state_dict().items()
    return write_hf_folder(folder, tensors, tiny_llama.config.to_dict(), max_shard_bytes=1)


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(sharded, tmp_path / "model")


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of all that was cut."""
    shapes: list[torch.Size] = []

    def recorded(out: Tensor, *args: Any) -> None:
        shapes.append(out.shape)
        shard_into(out, *args)

    monkeypatch.setattr(placement, "shard_into", recorded)
    return shapes


def index_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def add(folder: Path, name: str, tensor: Tensor) -> None:
    """One more tensor, in a file of its own."""
    save_file({name: tensor}, folder / f"{name}.safetensors")
    write_index(folder, {**index_of(folder), name: f"{name}.safetensors"})


def file_of(folder: Path, name: str) -> Path:
    return folder / index_of(folder)[name]


# Each spoils a tensor of its own and says what must be reported.


def absent_shard(folder: Path) -> str:
    path = file_of(folder, "model.layers.0.self_attn.q_proj.weight")
    path.unlink()
    return f"file {path} is absent: fetch it, or correct the index"


def absent_from_its_shard(folder: Path) -> str:
    name = "model.layers.0.self_attn.k_proj.weight"
    path = file_of(folder, name)
    save_file({}, path)
    return f"{path} lacks {name}, which the index places there"


def absent_from_the_index(folder: Path) -> str:
    write_index(folder, {name: file for name, file in index_of(folder).items() if name != NORM})
    return f"missing: {NORM}"


def unknown_tensor(folder: Path) -> str:
    name = "model.layers.0.self_attn.qk_proj.weight"
    add(folder, name, torch.zeros(2))
    return f"unknown tensor '{name}': LlamaLayer has no rule for it; nearest: self_attn.q_proj.weight"


def wrong_shape(folder: Path) -> str:
    name = "model.layers.1.mlp.up_proj.weight"
    add(folder, name, torch.zeros(71, 48))
    return f"wrong shape: {name} is (71, 48), the config asks for (70, 48)"


def unexpected_bias(folder: Path) -> str:
    name = "model.layers.1.mlp.down_proj.bias"
    add(folder, name, torch.zeros(48))
    return f"not expected: {name}: a trait of the model says that there is none"


def truncated(folder: Path) -> str:
    path = file_of(folder, "model.embed_tokens.weight")
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path} is truncated: its tensors need"


def corrupt(folder: Path) -> str:
    path = file_of(folder, "lm_head.weight")
    path.write_bytes(b"\xff" * 64)
    return f"{path} is truncated or corrupt"


FAULTS: tuple[Callable[[Path], str], ...] = (
    absent_shard,
    absent_from_its_shard,
    absent_from_the_index,
    unknown_tensor,
    wrong_shape,
    unexpected_bias,
    truncated,
    corrupt,
)


@pytest.mark.parametrize(
    "faults", [*((fault,) for fault in FAULTS), FAULTS], ids=lambda f: "+".join(x.__name__ for x in f)
)
def test_every_fault_is_reported_before_anything_is_cut(
    faults: tuple[Callable[[Path], str], ...], folder: Path, cut: list[torch.Size]
) -> None:
    expected = [fault(folder) for fault in faults]
    with pytest.raises(WeightError) as caught:
        build_engine(folder, num_blocks=8)
    found = sorted(caught.value.problems)
    assert len(found) == len(expected), found
    assert all(problem.startswith(text) for problem, text in zip(found, sorted(expected), strict=True)), found
    assert str(caught.value).splitlines()[: len(found)] == caught.value.problems and not cut


def test_a_file_that_cannot_be_listed(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(WeightError) as caught:
        build_engine(folder, num_blocks=8)
    assert len(caught.value.problems) == 1 and "is truncated or corrupt" in caught.value.problems[0]


def test_a_meta_tensor_in_memory(tiny_llama: Any) -> None:
    tensors = {**tiny_llama.state_dict(), NORM: torch.empty(48, device="meta")}
    with pytest.raises(WeightError, match=r"^model\.norm\.weight has no values, it is on the meta device"):
        build_engine(tensors, hf_config=llama_config().to_dict(), num_blocks=8)


@pytest.mark.parametrize("linear", ["plain", None])
@pytest.mark.parametrize("tied", [True, False])
def test_later_changes_of_a_module_do_not_show(linear: str | None, tied: bool) -> None:
    module = llama(llama_config(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True))
    ids = [3, 4, 5, 6]
    expected = reference(module, ids, [4])
    engine = build_engine(module, ops={"linear": linear} if linear else {}, num_blocks=8)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    assert error(engine.put([0], [ids], logits="all"), expected) < 1e-4


def test_a_tied_head_is_one_storage(tiny_llama: Any) -> None:
    config = {**tiny_llama.config.to_dict(), "tie_word_embeddings": True}
    model: TransformerModel = build_engine(tiny_llama, hf_config=config, num_blocks=8).model
    served = [p for c in (*model.layers, model.outer) for p in c.finalized().values() if p is not None]
    assert model.outer.word_unembed is None and isinstance(model.outer.word_emb, InferenceParameter)
    assert len({parameter.data.data_ptr() for parameter in served}) == len(served)
    assert sum(parameter.shape == (131, 48) for parameter in served) == 1
