import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from transformers import AutoConfig, LlamaForCausalLM

from phalanx.cli.plan import _print
from phalanx.parallel.plan import hollow_model
from phalanx.training.plan import plan_settings, plan_training
from tests.parallel.real_sizes import FOLDER, PUBLISHED

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def plan(run):
    def ask(model, *flags):
        done = run("plan", model, "--json", *flags)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return ask


def test_a_plan_in_json(plan, tiny_folder):
    found = plan(tiny_folder, "--tp", 2, "--dp", 3, "--zero", 1, "--dtype", "fp32")
    expected = {
        "model": str(tiny_folder),
        "model_type": "llama",
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "zero_stage": 1,
        "dtype": "float32",
        "optimizer": "AdamW",
        "optimizer_assumed": True,
        "verification": {"fault": "", "tried": True},
    }
    assert {name: found[name] for name in expected} == expected
    assert found["parameters"] == sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tiny_folder).parameters())
    (keys,) = [group for group in found["groups"] if group["name"] == "model.layers.{0..1}.self_attn.k_proj.weight"]
    # Two KV heads of 12, one a rank, in two layers, of 4 bytes an element.
    assert (keys["style"], keys["count"], keys["local_shapes"]) == ("column", 2, [[12, 48]] * 2)
    assert keys["weight_bytes"] == [12 * 48 * 2 * 4] * 2 and keys["partition"]["kind"] == "column"
    weights = [sum(group["weight_bytes"][rank] for group in found["groups"]) for rank in (0, 1)]
    assert weights == [rank["weights"] for rank in found["ranks"]]
    assert sum(weights) == 4 * (found["parameters"] + found["copied_parameters"])


def test_a_config_file_alone_and_one_rank(plan, tiny_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    for model in (tmp_path, tmp_path / "config.json"):
        found = plan(model)
        assert (found["tensor_parallel_size"], found["verification"], found["copied_parameters"]) == (1, None, 0)
        assert {group["style"] for group in found["groups"]} == {"whole"}


def test_for_people(run, tmp_path):
    picture = tmp_path / "plan.svg"
    done = run("plan", FOLDER / "mixtral-8x7b" / "config.json", "--tp", 4, "--dp", 2, "--zero", 2, "--picture", picture)
    for part in (
        "mixtral-8x7b (mixtral): 46,702,792,704 parameters over 4 tensor-parallel x 2 data-parallel ranks",
        "ZeRO 2, bfloat16, AdamW (assumed)",
        "experts, column",
        "tp_plan: packed_colwise; [gate; up]",
        "structure: replicated (router: each rank chooses among all experts)",
        "0-3  11,676,684,288  21.75 GiB",
        "Proven: a small model",
    ):
        assert part in done.stdout, done.stdout
    assert ElementTree.parse(picture).findtext("{http://www.w3.org/2000/svg}title") == "mixtral-8x7b"


def test_in_a_narrow_terminal_nothing_is_lost():
    found = plan_training(
        hollow_model(AutoConfig.from_pretrained(FOLDER / "falcon-7b")), plan_settings(tp_size=4), verify="off"
    )
    console = Console(width=80, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as captured:
        _print(console, "falcon-7b", found)
    text = captured.get()
    assert "…" not in text and max(len(line) for line in text.splitlines()) <= 80
    assert "1 KV head" in text and "3: 1216 x 4544" in text


def test_rules_of_a_training_config(run, plan, tmp_path):
    config = tmp_path / "ds.json"
    rules = [
        {"patterns": [r".*\.mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
    ]
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 4, "partition_config": {"layer_specs": rules}},
    }
    config.write_text(json.dumps(given))
    found = plan(FOLDER / "pythia-6.9b", "--config", config)
    assert (found["tensor_parallel_size"], found["zero_stage"], found["dtype"]) == (4, 1, "float32")
    (attention,) = [group for group in found["groups"] if group["name"].endswith("query_key_value.weight")]
    assert (attention["style"], attention["why_copied"]) == ("copied", "no rule names it")
    (up,) = [group for group in found["groups"] if group["name"].endswith("dense_h_to_4h.weight")]
    assert up["hand_written"] and up["rule"].startswith("layer_specs[0]")

    rules[0]["patterns"] = [r".*\.mlp\.dense_h_to_5h\.weight$"]
    config.write_text(json.dumps(given))
    done = run("plan", FOLDER / "pythia-6.9b", "--config", config, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == 2 and error["type"] == "RuleError" and "dense_h_to_4h" in error["message"]


def test_what_cannot_be_planned(run, tmp_path):
    done = run("plan", FOLDER / "phi-4", "--tp", 48)
    assert done.exit_code == 2 and "without a head" in done.stderr and "use fewer ranks" in done.stderr
    for flags, reason in (
        (["--picture", "plan.png"], "must end in .svg"),
        (["--verify", "maybe"], "expected error, warn or off"),
        (["--dtype", "int8"], "int8"),
        (["--dtype", "float64"], "float32, bfloat16 or float16"),
    ):
        done = run("plan", FOLDER / "phi-4", *flags)
        assert done.exit_code == 2 and reason in done.stderr, done.stderr
    assert run("plan", tmp_path / "absent", "--json").exit_code == 2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    done = run("plan", tmp_path, "--json")
    assert done.exit_code == 2 and "no_such_model" in json.loads(done.stdout)["error"]["message"]


def test_the_page_shows_real_output(run, tmp_path):
    """docs/planning.md and its picture are what its commands print and draw."""
    page = (DOCS / "planning.md").read_text()
    command, shown = re.search(r"```bash\nphalanx (.+)\n```\n\n```\n(.*?)\n```", page, re.DOTALL).groups()
    arguments = command.replace("examples/configs", str(FOLDER)).replace("docs/", f"{tmp_path}/").split()
    done = run(*arguments)
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()
    assert (tmp_path / "phi-4.svg").read_text() == (DOCS / "phi-4.svg").read_text()
    refused = page.split("```\n")[-2]
    assert run("plan", FOLDER / "phi-4", "--tp", 48).stderr == refused
    assert {path.name for path in FOLDER.iterdir()} == set(PUBLISHED)
