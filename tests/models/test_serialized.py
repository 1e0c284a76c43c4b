"""Serialised checkpoints: loaded without the original they answer bit for bit the same; all else is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from phalanx.models import HFConfig, ModelConfigError
from phalanx.models.llama import LlamaPolicy
from phalanx.ops import registry
from phalanx.ops.linear import PlainLinear
from phalanx.weights import WeightError
from tests.models.kit import stub
from tests.models.tiny import llama, llama_config

IDS = [3, 4, 5, 6, 7, 8]
SETTINGS: dict[str, Any] = {"num_blocks": 8, "max_model_len": 32}


def serialized(model: Any, folder: Path, world: int, **settings: Any) -> list[Tensor]:
    """Writes a checkpoint; the logits of every rank that wrote it."""

    def run(group: Group) -> Tensor:
        engine = build_engine(model, group=group, tensor_parallel_size=group.size, **SETTINGS, **settings)
        engine.serialize(folder)
        return engine.put([0], [IDS], logits="all")

    return run_threads(world, run)


def logits(folder: Path, world: int, **settings: Any) -> list[Tensor]:
    """What every rank answers that loads it."""

    def run(group: Group) -> Tensor:
        engine = build_engine(folder, group=group, tensor_parallel_size=group.size, **SETTINGS, **settings)
        return engine.put([0], [IDS], logits="all")

    return run_threads(world, run)


def refusal(folder: Path, world: int = 1, **settings: Any) -> list[str]:
    """What every rank is told that may not load it, without the folder's name; all ranks alike."""

    def run(group: Group) -> list[str]:
        with pytest.raises(WeightError) as caught:
            build_engine(folder, group=group, tensor_parallel_size=group.size, **SETTINGS, **settings)
        return caught.value.problems

    told = run_threads(world, run)
    return [problem.replace(f"{folder}: ", "").replace(f"{folder}/", "") for problem in told[0]]


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"attention_bias": True, "mlp_bias": True}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"num_key_value_heads": 1}, {"dtype": "bfloat16"}),
        ({"tie_word_embeddings": True}, {"ops": {"linear": "plain"}}),
    ],
    ids=["plain", "biases", "tied", "bf16", "tied-plain-layout"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_bit_equal_without_the_original(
    world: int, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    original = tmp_path / "original"
    llama(llama_config(**changes)).save_pretrained(original)
    written = serialized(original, tmp_path / "served", world, **settings)
    shutil.rmtree(original)
    for before, after in zip(written, logits(tmp_path / "served", world, **settings), strict=True):
        assert torch.equal(before, after)


@pytest.fixture(scope="module")
def served(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at TP 1, its linear weights in the plain layout."""
    folder = tmp_path_factory.mktemp("served") / "checkpoint"
    serialized(tiny_llama, folder, 1, ops={"linear": "plain"})
    return folder


@pytest.fixture
def folder(served: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(served, tmp_path / "checkpoint")


def test_the_files_of_a_rank(tiny_llama: Any, tmp_path: Path) -> None:
    serialized(tiny_llama, tmp_path / "two", 2)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "phalanx.json",
        *(f"rank_{rank}_of_2.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")),
    ]


def test_a_tied_head_is_stored_once(tiny_llama: Any, served: Path, tmp_path: Path) -> None:
    config = {**tiny_llama.config.to_dict(), "tie_word_embeddings": True}
    serialized(tiny_llama, tmp_path / "tied", 1, hf_config=config, ops={"linear": "plain"})
    table = 131 * 48 * 4
    sizes = [(path / "rank_0_of_1.safetensors").stat().st_size for path in (served, tmp_path / "tied")]
    # Two tables, or one; and the header says it in a few bytes.
    assert table <= sizes[0] - sizes[1] < table + 200
    entries = json.loads((tmp_path / "tied" / "rank_0_of_1.json").read_text())
    assert entries["outer.word_unembed"] is None and entries["outer.word_emb"]["shape"] == [131, 48]


def test_what_a_model_lacks_is_none(served: Path) -> None:
    entries = json.loads((served / "rank_0_of_1.json").read_text())
    absent = {name.split(".")[-1] for name, entry in entries.items() if entry is None}
    assert absent == {"qkv_bias", "attn_out_bias", "mlp_1_bias", "mlp_2_bias"}
    assert not any("bias" in name for name in load_file(served / "rank_0_of_1.safetensors"))


def test_served_weights_do_not_lie_in_the_file(folder: Path) -> None:
    engine = build_engine(folder, **SETTINGS)
    path = folder / "rank_0_of_1.safetensors"
    before = engine.put([0], [IDS], logits="all")
    path.write_bytes(b"\0" * path.stat().st_size)
    engine.flush(0)
    assert torch.equal(engine.put([0], [IDS], logits="all"), before)


def test_writing_over_a_checkpoint_replaces_it(tiny_llama: Any, tmp_path: Path) -> None:
    other = llama(llama_config(), seed=5)
    serialized(other, tmp_path / "c", 2)
    written = serialized(tiny_llama, tmp_path / "c", 2)
    assert all(torch.equal(a, b) for a, b in zip(written, logits(tmp_path / "c", 2), strict=True))


def test_an_interrupted_save_is_no_checkpoint(tiny_llama: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    engine = build_engine(tiny_llama, **SETTINGS)
    monkeypatch.setattr("phalanx.models.serialized._write_json", full)
    with pytest.raises(OSError, match="no space left"):
        engine.serialize(folder)
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        build_engine(folder, **SETTINGS)


# -- refused


def test_another_tp_size(served: Path) -> None:
    expected = ["serialised with tensor_parallel_size=1, this engine has tensor_parallel_size=2"]
    assert refusal(served, world=2) == expected


def test_every_reason_is_listed(served: Path, tiny_llama: Any) -> None:
    class OtherPolicy(LlamaPolicy):
        pass

    changed = {**tiny_llama.config.to_dict(), "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 7.0}}
    policy = OtherPolicy(HFConfig(changed), inference_checkpoint=served)
    with pytest.raises(WeightError) as caught:
        policy.build_model(EngineConfig(device="cpu", dtype="bfloat16"), stub(rank=0, size=2))
    assert caught.value.problems == [
        f"{served}: serialised with policy='LlamaPolicy', this engine has policy='OtherPolicy'",
        f"{served}: serialised with tensor_parallel_size=1, this engine has tensor_parallel_size=2",
        f"{served}: serialised with dtype='float32', this engine has dtype='bfloat16'",
        f"{served}: serialised from another model: the configs differ in rms_norm_eps, rope_parameters",
    ]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "rank_0_of_1.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "rank_0_of_1.safetensors")


def no_rank_file(folder: Path) -> None:
    (folder / "rank_0_of_1.safetensors").unlink()


def no_rank_json(folder: Path) -> None:
    (folder / "rank_0_of_1.json").unlink()


def truncated_tensors(folder: Path) -> None:
    path = folder / "rank_0_of_1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def corrupt_tensors(folder: Path) -> None:
    (folder / "rank_0_of_1.safetensors").write_bytes(b"\xff" * 100)


def truncated_json(folder: Path) -> None:
    path = folder / "rank_0_of_1.json"
    path.write_text(path.read_text()[:-20])


def list_json(folder: Path) -> None:
    (folder / "rank_0_of_1.json").write_text("[]")


def entries_gone_and_added(folder: Path) -> None:
    edit(folder / "rank_0_of_1.json", lambda entries: entries.pop("layer.0.qkv"))
    edit(folder / "rank_0_of_1.json", lambda entries: entries.pop("outer.word_emb"))
    edit(folder / "rank_0_of_1.json", lambda entries: entries.update({"layer.7.qkv": None}))


def tensors_gone(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: (tensors.pop("layer.1.mlp_2"), tensors.pop("outer.final_norm")))


def another_shape(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"outer.final_norm": torch.ones(47)}))


def corrupt_entry(folder: Path) -> None:
    edit(folder / "rank_0_of_1.json", lambda entries: entries.update({"outer.final_norm": {"shape": [48]}}))


def another_layout(folder: Path) -> None:
    edit(folder / "rank_0_of_1.json", lambda entries: entries["layer.0.qkv"].update(layout="tiles"))


def unknown_format(folder: Path) -> None:
    edit(folder / "phalanx.json", lambda manifest: manifest.update(format=99))


def no_format(folder: Path) -> None:
    edit(folder / "phalanx.json", lambda manifest: manifest.pop("format"))


def half_a_manifest(folder: Path) -> None:
    edit(folder / "phalanx.json", lambda manifest: (manifest.pop("config"), manifest.pop("dtype")))


def unreadable_manifest(folder: Path) -> None:
    (folder / "phalanx.json").write_text("{")


SPOILED: dict[Callable[[Path], None], list[str]] = {
    no_rank_file: ["file rank_0_of_1.safetensors is absent"],
    no_rank_json: ["rank_0_of_1.json cannot be read"],
    truncated_tensors: ["rank_0_of_1.safetensors is truncated"],
    corrupt_tensors: ["rank_0_of_1.safetensors is truncated or corrupt"],
    truncated_json: ["rank_0_of_1.json cannot be read"],
    list_json: ["rank_0_of_1.json holds a list, expected a JSON object"],
    entries_gone_and_added: [
        "rank_0_of_1.json lacks the parameter layer.0.qkv",
        "rank_0_of_1.json lacks the parameter outer.word_emb",
        "rank_0_of_1.json has layer.7.qkv, which this model lacks",
    ],
    tensors_gone: [
        "layer.1.mlp_2: the tensor layer.1.mlp_2 is absent",
        "outer.final_norm: the tensor outer.final_norm is absent",
    ],
    another_shape: ["outer.final_norm: its tensor is (47,), its entry says (48,)"],
    corrupt_entry: ["outer.final_norm: its entry is corrupt"],
    another_layout: ["layer.0.qkv: serialised in the layout 'tiles': linear: no implementation named 'tiles'"],
    unknown_format: ["was serialised in format 99, this is format 2"],
    no_format: ["was serialised in format None, this is format 2"],
    half_a_manifest: ["phalanx.json is corrupt: it does not say dtype, config"],
    unreadable_manifest: ["phalanx.json cannot be read"],
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_checkpoint(spoil: Callable[[Path], None], folder: Path) -> None:
    spoil(folder)
    problems = refusal(folder)
    assert len(problems) == len(SPOILED[spoil]), problems
    assert all(text in problem for text, problem in zip(SPOILED[spoil], problems, strict=True)), problems


def test_another_layout_than_this_engine_is_told_to_use(served: Path) -> None:
    registry.register("linear", "mine", PlainLinear(), priority=-1)
    try:
        problems = refusal(served, ops={"linear": "mine"})
    finally:
        registry.unregister("linear", "mine")
    # Every linear weight: four of each layer and the head.
    assert len(problems) == 9
    assert problems[0] == "layer.0.qkv: serialised in the layout 'plain', this engine is told to use 'mine'"


def test_a_policy_that_is_not_here(folder: Path) -> None:
    edit(folder / "phalanx.json", lambda manifest: manifest.update(policy="TheirPolicy"))
    with pytest.raises(ModelConfigError, match="serialised by TheirPolicy, which is not known here: import it"):
        build_engine(folder, **SETTINGS)
