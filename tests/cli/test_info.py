import json

import pytest
from transformers import LlamaForCausalLM

from phalanx import LLM
from phalanx.models import load_families
from tests.tiny_tokenizer import VOCAB_SIZE


@pytest.fixture
def info(run):
    def ask(model, *flags):
        done = run("info", model, "--json", *flags)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return ask


def test_what_a_model_is(info, tiny_folder):
    found = info(tiny_folder)
    expected = {
        "model": str(tiny_folder),
        "path": str(tiny_folder),
        "model_type": "llama",
        "policy": "LlamaPolicy",
        "weights": "safetensors",
        "problems": [],
        "checkpoint_dtype": "float32",
        "dtype": "float32",
        "eos_token_ids": [2],
        "has_tokenizer": True,
        "has_chat_template": True,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "hidden_size": 48,
        "intermediate_size": 70,
        "vocab_size": VOCAB_SIZE,
        "context": 256,
        "tied_head": False,
        "windows": [],
    }
    assert {name: found[name] for name in expected} == expected
    assert found["rope"]["kind"] == "default" and found["rope"]["rotary_dim"] == 12
    assert found["parameters"] == sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tiny_folder).parameters())


def test_what_it_takes_on_each_rank(info, tiny_folder):
    one = info(tiny_folder, "--dtype", "bfloat16", "--block-size", 8, "--tokens", 100)
    assert one["memory"] == {
        "tokens": 100,
        "ranks": [{"kv_bytes": 13 * 8 * one["kv_bytes_per_token"], "parameter_bytes": 2 * one["parameters"]}],
    }
    three = info(tiny_folder, "--tp", 3)
    # Two KV heads over three ranks: the first is held twice, its two query heads are shared out.
    assert [(rank["query_heads"], rank["kv_heads"]) for rank in three["ranks"]] == [(1, 1), (1, 1), (2, 1)]
    assert three["parameters"] == one["parameters"] < sum(rank["parameters"] for rank in three["ranks"])


def test_a_config_alone(info, tiny_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    found, whole = info(tmp_path, "--tp", 2), info(tiny_folder, "--tp", 2)
    assert found["weights"] == "absent" and "holds no weights" in found["problems"][0]
    assert (found["has_tokenizer"], found["has_chat_template"]) == (False, False)
    assert (found["parameters"], found["ranks"]) == (whole["parameters"], whole["ranks"])


def test_faulty_weights_are_told(info, tiny_folder, tmp_path):
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    found = info(tmp_path)
    assert "truncated" in "".join(found["problems"]) and found["parameters"] == info(tiny_folder)["parameters"]


def test_a_serialised_checkpoint(info, tiny_folder, tmp_path):
    with LLM(tiny_folder, num_blocks=8, dtype="bfloat16") as llm:
        llm.engine.serialize(tmp_path / "served")
    found = info(tmp_path / "served")
    assert found["weights"] == "serialised" and found["problems"] == []
    assert (found["dtype"], found["parameter_bytes"]) == ("bfloat16", 2 * info(tiny_folder)["parameters"])


@pytest.mark.parametrize("kind", ["mamba", "no_such_model"])
def test_a_model_that_is_not_served(run, info, tiny_folder, tmp_path, kind):
    load_families()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "eos_token_id": 7}))
    found = info(tmp_path)
    assert found["model_type"] == kind and found["eos_token_ids"] == [7] and "policy" not in found
    assert any("is not served" in problem or "cannot be served" in problem for problem in found["problems"])
    done = run("info", tmp_path)
    assert done.exit_code == 0 and "served by nothing here" in done.stdout


def test_for_people(run, tiny_folder):
    text = run("info", tiny_folder, "--tp", 2, "--tokens", 1000).stdout
    for part in (
        "llama, served by LlamaPolicy",
        "4 query, 2 KV, of 12",
        "256 tokens",
        "KV of 1,000",
        "chat template  yes",
    ):
        assert part in text


def test_nothing_there(run, tmp_path):
    done = run("info", tmp_path / "absent", "--json")
    assert done.exit_code == 2 and "neither a folder" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.slow
def test_the_packaged_model(info):
    found = info("smollm2", "--tp", 2)
    assert (found["weights"], found["context"], found["eos_token_ids"]) == ("gguf", 8192, [2])
    assert found["parameters"] == 134_515_008 and found["tied_head"]
    assert [(rank["query_heads"], rank["kv_heads"]) for rank in found["ranks"]] == [(6, 2), (3, 1)]
