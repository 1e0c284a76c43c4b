"""`phalanx train`: recipes, samples, the loop over two ranks, what is resumed, what comes out."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx import LLM
from phalanx.cli import app
from phalanx.config import ConfigError
from phalanx.training.checkpoint_folder import Saved
from phalanx.training.recipe import DataRecipe, OptimizationRecipe, read_recipe
from phalanx.training.run import main, rate, train
from phalanx.training.text_data import IGNORED, batches, read_samples
from tests.tiny_tokenizer import tiny_tokenizer

TEXT = " ".join(f"number {n} follows {n - 1}, and then comes {n + 1}." for n in range(400))


def write_recipe(folder: Path, model: Path, /, **changes: dict[str, Any]) -> Path:
    (folder / "text.txt").write_text(TEXT)
    recipe: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": [str(folder / "text.txt")], "sequence_length": 16},
        "optimization": {"batch_size": 4, "micro_batch_size": 1, "steps": 6, "learning_rate": 3e-3, "warmup_steps": 1},
        "parallel": {"tensor_parallel_size": 2, "zero_stage": 2},
        "output": {"folder": str(folder / "run"), "checkpoint_every": 3, "keep": 1},
    }
    for section, values in changes.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


def run(recipe: Path, *flags: str, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx.cli", "train", str(recipe), "--nproc", str(nproc), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_on_two_ranks_and_its_model_is_served(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, data={"validation": [str(tmp_path / "text.txt")]})
    done = run(recipe)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert list(found) == [1, 2, 3, 4, 5, 6] and found[6] < found[1]
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 6 and last["validation_loss"] < found[1]
    tags = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith("global")]
    assert tags == ["global_step6"]
    assert f"phalanx generate {tmp_path / 'run' / 'model'} " in done.stderr
    again = CliRunner().invoke(app, ["train", str(recipe), "--nproc", "2"])
    assert again.exit_code == 2 and again.stderr.count("holds a run already: go on with --resume") == 1
    with LLM(str(tmp_path / "run" / "model"), num_blocks=64, block_size=4, device="cpu") as llm:
        assert llm.generate("number 7 follows", max_tokens=8, temperature=0)[0].outputs[0].text


@pytest.mark.slow
def test_a_run_that_is_told_to_end_goes_on_on_other_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    alone = {"tensor_parallel_size": 1, "zero_stage": 0}
    longer = {"steps": 30}
    assert run(write_recipe(whole, tiny_folder, parallel=alone, optimization=longer), nproc=1).returncode == 0
    recipe = write_recipe(cut, tiny_folder, parallel=alone, optimization=longer)
    process = subprocess.Popen([sys.executable, "-m", "phalanx.training.run", str(recipe)], stderr=subprocess.DEVNULL)
    log = cut / "run" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    # Unless it had finished just then.
    assert process.wait(60) in (143, 0)
    done = run(write_recipe(cut, tiny_folder, optimization=longer), "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-4)


def test_recipes_name_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[model]\npath = "x"\nkind = 3\n[data]\ntrain = []\n[optimization]\nlearning_rat = 1\n[output]\n')
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    for part in ("model.kind", "data.train", "did you mean learning_rate", "output.folder"):
        assert part in str(caught.value)
    path.write_text('[model]\npath = "x"\n[data]\ntrain = ["y"]\n[optimization]\n[output]\nfolder = "z"\n')
    with pytest.raises(ConfigError, match="either steps or epochs"):
        read_recipe(path)
    path.write_text("[model")
    with pytest.raises(ConfigError, match="neither TOML"):
        read_recipe(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "none.json")
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.exit_code == 2


def test_rank_0_is_let_say_first_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said_before: list[str] = []
    monkeypatch.setattr("phalanx.training.run.time.sleep", lambda seconds: said_before.append(capsys.readouterr().err))
    monkeypatch.setattr("phalanx.training.run.signal.signal", lambda *told: None)
    for rank, waits in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        assert main([str(tmp_path / "none.json")]) == 1
        assert "cannot be read" in capsys.readouterr().err and said_before == [""] * waits


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("optimization", "epochs", float("inf"), "optimization.epochs: Input should be a finite number"),
        ("optimization", "seed", -1, "optimization.seed"),
        ("data", "sequence_length", 1, "data.sequence_length"),
        ("output", "profile_steps", [5, 2], "in this order"),
    ],
)
def test_recipes_name_values_out_of_range(tmp_path: Path, section: str, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_recipe(write_recipe(tmp_path, Path("x"), **{section: {key: value}}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": {"optimizer": {"type": "SGD"}}}, "engine.optimizer: the recipe says that itself"),
        ({"data": {"sequence_length": 1000, "packing": False}}, "more than the 256 positions of the model"),
        ({"output": {"folder": "text.txt/run"}}, "output.folder="),
    ],
)
def test_what_cannot_be_trained_is_said_before(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = {"tensor_parallel_size": 1}
    with pytest.raises(ConfigError, match=said):
        train(read_recipe(write_recipe(tmp_path, tiny_folder, parallel=alone, **changes)))


def test_an_update_that_breaks_the_model_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    """In the last step, whose loss is a number still."""
    recipe = write_recipe(
        tmp_path, tiny_folder, parallel={"tensor_parallel_size": 1}, optimization={"learning_rate": 1e30, "steps": 2}
    )
    with pytest.raises(ConfigError, match=r"the (gradient norm|loss) of step 2 is (nan|inf)"):
        train(read_recipe(recipe))
    assert not (tmp_path / "run" / "model").exists()


def test_no_checkpoint_holds_a_broken_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Between two lines of the log, too."""
    alone, how = {"tensor_parallel_size": 1}, {"learning_rate": 1e30, "steps": 6}
    often = {"log_every": 50, "checkpoint_every": 1, "export": False}
    with pytest.raises(ConfigError, match="lower the learning rate"):
        train(read_recipe(write_recipe(tmp_path, tiny_folder, parallel=alone, optimization=how, output=often)))
    assert len(list((tmp_path / "run" / "checkpoints").glob("global_step*"))) <= 1


def test_a_changed_recipe_and_a_log_that_is_cut_off_go_on(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = {"tensor_parallel_size": 1, "zero_stage": 0}

    def go(steps: int, **how: Any) -> None:
        path = write_recipe(
            tmp_path, tiny_folder, parallel=alone, optimization={"steps": steps, **how}, output={"export": False}
        )
        assert train(read_recipe(path), resume=True) == 0

    go(2)
    log, checkpoints = tmp_path / "run" / "log.jsonl", tmp_path / "run" / "checkpoints"
    with log.open("a") as file:
        file.write('{"step": 3, "lo')
    shutil.copytree(checkpoints / "global_step2", checkpoints / "global_step2-kept")
    go(4, learning_rate=1e-6, weight_decay=0.5)
    assert "learning_rate is 1e-06 from step 3 on; it was 0.003" in caplog.text
    assert "weight_decay is 0.5 from step 3 on; it was 0" in caplog.text
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[1]["learning_rate"] > 1e-4 and lines[2]["learning_rate"] < 1e-6
    groups = Saved(checkpoints / "global_step4").index["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    # Only its own checkpoints are taken away, and never the one that was written last.
    assert (checkpoints / "global_step2-kept").is_dir() and not (checkpoints / "global_step2").exists()
    shutil.copytree(checkpoints / "global_step4", checkpoints / "global_step9")
    go(5)
    assert (checkpoints / "global_step5" / "index.json").is_file()
    with pytest.raises(ConfigError, match="step 5, and the recipe ends at step 3"):
        go(3)


def test_other_data_does_not_go_on(tiny_folder: Path, tmp_path: Path) -> None:
    alone = {"tensor_parallel_size": 1, "zero_stage": 0}
    text = tmp_path / "text.txt"

    def go(before: Any = lambda: None, **changes: Any) -> None:
        changes = {"optimization": {"steps": 1}, **changes}
        recipe = read_recipe(write_recipe(tmp_path, tiny_folder, parallel=alone, **changes))
        before()
        assert train(recipe, resume=True) == 0

    go()
    for changes, said in [
        ({"optimization": {"steps": 2, "batch_size": 8}}, "optimization.batch_size was 4 and is 8"),
        ({"optimization": {"steps": 2, "seed": 1}}, "optimization.seed was 0 and is 1"),
        ({"data": {"sequence_length": 32}}, "data.sequence_length was 16 and is 32"),
        ({"data": {"packing": False}}, "data.packing was True and is False"),
        ({"before": lambda: text.write_text(TEXT.replace("then", "soon"))}, "of another text"),
    ]:
        with pytest.raises(ConfigError, match=said):
            go(**changes)
    # The same text at another place, in passes of another size.
    moved = tmp_path / "moved.txt"
    go(
        lambda: text.rename(moved),
        data={"train": [str(moved)]},
        optimization={"steps": 2, "micro_batch_size": 2},
        output={"export": False},
    )
    assert (tmp_path / "run" / "checkpoints" / "global_step2").is_dir()


def test_texts_are_packed_one_behind_the_other(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"line {n} of a text"}) for n in range(20)))
    recipe = DataRecipe(train=(str(tmp_path / "*.jsonl"),), sequence_length=8)
    samples = read_samples(recipe, recipe.train, tokenizer)
    whole: list[int] = []
    for n in range(20):
        whole += [*tokenizer(f"line {n} of a text")["input_ids"], tokenizer.eos_token_id]
    assert samples.ids.ravel().tolist() == whole[: len(whole) // 8 * 8]
    assert np.array_equal(samples.ids, samples.labels) and samples.documents == 20
    with pytest.raises(ConfigError, match="do not fill one sample"):
        read_samples(recipe.model_copy(update={"sequence_length": 10_000}), recipe.train, tokenizer)
    # A byte order mark, ends of lines of Windows, and a separator that is none here.
    lines = [json.dumps({"text": f"one\u2028two {n}"}, ensure_ascii=False) for n in range(9)]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert read_samples(recipe, recipe.train, tokenizer).documents == 9
    (tmp_path / "a.jsonl").write_text('{"txt": 1}')
    with pytest.raises(ConfigError, match="line 1 has neither"):
        read_samples(recipe, recipe.train, tokenizer)


def test_only_what_the_assistant_says_is_learnt(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two three"},
        {"role": "user", "content": "four"},
        {"role": "assistant", "content": "five"},
    ]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "d.jsonl").write_text((json.dumps({"messages": messages[:1]}) + "\n") * 9)
    recipe = DataRecipe(train=(str(tmp_path / "d.jsonl"),), sequence_length=8)
    for packing in (True, False):
        with pytest.raises(ConfigError, match="nothing to learn"):
            read_samples(recipe.model_copy(update={"packing": packing}), recipe.train, tokenizer)
    recipe = DataRecipe(train=(str(tmp_path / "c.jsonl"),), sequence_length=96, packing=False)
    samples = read_samples(recipe, recipe.train, tokenizer)
    learnt = tokenizer.decode([token for token in samples.labels[0].tolist() if token != IGNORED])
    assert "two three" in learnt and "five" in learnt and "one" not in learnt and "four" not in learnt
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    count = int(samples.mask.sum())
    assert samples.ids[0, :count].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"][:96]


def test_every_pass_has_every_sample_once() -> None:
    drawn = batches(10, 4, seed=3)
    rows = [row for _ in range(5) for row in next(drawn)]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10)) and rows[:10] != rows[10:]
    later = batches(10, 4, seed=3, start=3)
    assert next(later) == rows[12:16]


def test_rates() -> None:
    cosine = OptimizationRecipe(steps=100, warmup_steps=10)
    assert [round(rate(cosine, step, 100), 3) for step in (0, 9, 10, 55, 100)] == [0.091, 0.909, 1.0, 0.55, 0.1]
    linear = OptimizationRecipe(steps=100, schedule="linear")
    assert [rate(linear, step, 100) for step in (0, 50, 100)] == [1.0, 0.5, 0.0]


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": n, "loss": 3 - n / 10, "grad_norm": None}) + "\n" for n in range(1, 9)))
    out = tmp_path / "run.svg"
    assert CliRunner().invoke(app, ["plot", str(log), "-o", str(out)]).exit_code == 0
    drawn = out.read_text()
    assert drawn.count('class="curve"') == 1 and "step 8" in drawn and "not in the log" in drawn
    with log.open("a") as file:
        file.write('{"step": 9, "lo')
    assert CliRunner().invoke(app, ["plot", str(log), "-o", str(out)]).exit_code == 0
    log.write_text("{}\n")
    result = CliRunner().invoke(app, ["plot", str(log), "-o", str(out)])
    assert result.exit_code == 2


@pytest.mark.slow
def test_a_real_model_learns_a_real_text(tmp_path: Path) -> None:
    import pydoc_data.topics

    text = "\n\n".join(value for _, value in sorted(pydoc_data.topics.topics.items()))
    (tmp_path / "topics.txt").write_text(text[:200_000])
    recipe = write_recipe(
        tmp_path,
        Path("smollm2"),
        model={"path": "smollm2"},
        data={"train": [str(tmp_path / "topics.txt")], "sequence_length": 128},
        optimization={"batch_size": 4, "micro_batch_size": 2, "steps": 40, "learning_rate": 5e-5, "warmup_steps": 4},
    )
    command = [sys.executable, "-m", "phalanx.cli", "train", str(recipe), "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert np.mean([found[n] for n in range(36, 41)]) < np.mean([found[n] for n in range(1, 6)]) - 0.2
    generate = [sys.executable, "-m", "phalanx.cli", "generate", str(tmp_path / "run" / "model"), "The yield statement"]
    said = subprocess.run([*generate, "--max-tokens", "12"], capture_output=True, text=True, timeout=300)
    assert said.returncode == 0 and said.stdout.strip()
