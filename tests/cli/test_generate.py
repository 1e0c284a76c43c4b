import json
from pathlib import Path

import pytest

from phalanx import LLM
from tests.cli.conftest import ENGINE, records


@pytest.fixture(scope="module")
def answers(tiny_folder):
    """What the library answers to a prompt, by way of the chat template or not."""
    with LLM(tiny_folder, num_blocks=64) as llm:

        def answer(prompt, template=True, **settings):
            if template:
                return llm.chat([{"role": "user", "content": prompt}], settings)[0].outputs
            return llm.generate(prompt, settings)[0].outputs

        yield answer


def test_one_prompt_is_printed_as_it_comes(run, tiny_folder, answers):
    done = run("generate", tiny_folder, "hello", "--max-tokens", 9, *ENGINE)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == answers("hello", max_tokens=9)[0].text + "\n"


def test_the_chat_template_may_be_left_out(run, tiny_folder, answers):
    plain = run("generate", tiny_folder, "hello", "--no-chat", "--max-tokens", 9, *ENGINE).stdout
    assert plain == answers("hello", template=False, max_tokens=9)[0].text + "\n"
    assert plain != run("generate", tiny_folder, "hello", "--chat", "--max-tokens", 9, *ENGINE).stdout


def test_a_model_without_template_takes_plain_prompts(run, tiny_folder, tmp_path, answers):
    for file in tiny_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = run("generate", tmp_path, "hello", "--max-tokens", 9, *ENGINE)
    assert done.stdout == answers("hello", template=False, max_tokens=9)[0].text + "\n"
    done = run("generate", tmp_path, "hello", "--chat", *ENGINE)
    assert done.exit_code == 2 and "no chat template" in done.stderr


def test_several_prompts_and_answers_for_people(run, tiny_folder, answers):
    settings = {"max_tokens": 5, "temperature": 1, "seed": 3, "n": 2}
    flags = ["--max-tokens", 5, "--temperature", 1, "--seed", 3, "--n", 2]
    done = run("generate", tiny_folder, "one", "two", *flags, *ENGINE)
    expected = [
        f"[{number}] {prompt}\n" + "".join(f"{answer.text}\n" for answer in answers(prompt, **settings)) + "\n"
        for number, prompt in enumerate(["one", "two"], start=1)
    ]
    assert (done.exit_code, done.stdout) == (0, "".join(expected))


def test_json_gives_a_record_a_prompt(run, tiny_folder, answers):
    flags = ["--max-tokens", 4, "--logprobs", 2, "--prompt-logprobs", 1]
    done = run("generate", tiny_folder, "one", "two", "--json", *flags, *ENGINE)
    found = records(done.stdout)
    assert [record["prompt"] for record in found] == ["one", "two"] and done.exit_code == 0
    for record in found:
        expected = answers(record["prompt"], max_tokens=4, logprobs=2)[0]
        output = record["outputs"][0]
        assert (record["text"], output["token_ids"]) == (expected.text, expected.token_ids)
        assert output["finish_reason"] == "length"
        assert [max(line.values()) for line in output["logprobs"]] == pytest.approx(
            [max(line.values()) for line in expected.logprobs], abs=1e-4
        )
        assert len(record["prompt_logprobs"]) == len(record["prompt_token_ids"])


LINES = [
    {"prompt": "hello", "max_tokens": 3, "id": "a"},
    {"prompt": [5, 6, 7], "max_tokens": 2},
    {"prompt": "hello", "temprature": 1},
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    {"messages": [{"role": "wizard", "content": "hello"}]},
    {"prompt": [5, 999]},
    {"prompt": "x" * 300},
]


@pytest.mark.parametrize("way", ["file", "pipe"])
def test_json_lines_in_and_out(run, tiny_folder, tmp_path, answers, way):
    text = "\n".join([*map(json.dumps, LINES), "{", ""])
    if way == "file":
        (tmp_path / "in.jsonl").write_text(text)
        done = run(
            "generate", tiny_folder, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", *ENGINE
        )
        assert done.stdout == "" and sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
        found = records((tmp_path / "out.jsonl").read_text())
    else:
        done = run("generate", tiny_folder, "--input", "-", "--output", "-", *ENGINE, input=text)
        found = records(done.stdout)
    # Bad input, though the good lines have run.
    assert done.exit_code == 2 and "5 of 8 prompts have an error" in done.stderr
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found[0]["id"] == "a"
    assert found[0]["text"] == found[3]["text"] == answers("hello", max_tokens=3)[0].text
    assert len(found[1]["outputs"][0]["token_ids"]) == 2
    messages = [record["error"]["message"] for record in found if "error" in record]
    for message, part in zip(
        messages,
        ["did you mean temperature", "unknown role wizard", "999 is outside", "the limit is", "Expecting"],
        strict=True,
    ):
        assert part in message


def test_flags_are_the_defaults_of_lines(run, tiny_folder):
    lines = '{"prompt": "a"}\n{"prompt": "a", "max_tokens": 2}\n'
    done = run("generate", tiny_folder, "--input", "-", "--max-tokens", 5, *ENGINE, input=lines)
    assert [len(record["outputs"][0]["token_ids"]) for record in records(done.stdout)] == [5, 2]


def test_a_line_separator_inside_a_text_is_no_end_of_line(run, tiny_folder):
    line = json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    done = run("generate", tiny_folder, "--input", "-", "--max-tokens", 1, *ENGINE, input=line)
    assert [record["prompt"] for record in records(done.stdout)] == ["a\u2028b\u0085c"]


def test_a_run_that_fails_leaves_what_it_has_aside(run, tiny_folder, tmp_path, monkeypatch):
    steps = []

    def broken(llm):
        steps.append(llm)
        raise RuntimeError("rank 1 died")

    (tmp_path / "out.jsonl").write_text("before")
    monkeypatch.setattr(LLM, "step", broken)
    done = run("generate", tiny_folder, "a", "--output", tmp_path / "out.jsonl", *ENGINE)
    assert done.exit_code == 1 and "rank 1 died" in done.stderr and steps
    assert (tmp_path / "out.jsonl").read_text() == "before" and (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give prompts or --input"),
        (["a", "--input", "-"], "give prompts or --input"),
        (["a", "--logprobs", "1"], "add --json"),
        (["a", "--temperature", "-1"], "temperature: Input should be greater"),
        (["a", "--n", "2"], "at temperature 0 would be the same"),
        (["a", "--max-tokens", "9999"], "above the context of 256"),
        (["a", "--dtype", "int8"], "'int8' is not one of float64"),
        (["a", "--op", "attention=mine"], "no implementation named 'mine'"),
        (["a", "--plugin", "no_such_package"], "'no_such_package' cannot be imported"),
        (["a", "--kv-cache-memory", "much"], "'much' is not a size"),
        (["--input", "/absent.jsonl"], "/absent.jsonl"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(run, tiny_folder, arguments, message):
    done = run("generate", tiny_folder, *arguments, *ENGINE)
    assert done.exit_code == 2 and message in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr
    done = run("generate", tiny_folder, *arguments, "--json", *ENGINE)
    if "--logprobs" not in arguments:
        assert done.exit_code == 2 and message in done.stdout


def test_ranks(run, tiny_folder, answers):
    done = run("generate", tiny_folder, "hello", "--max-tokens", 9, "--tp", 2, *ENGINE)
    assert (done.exit_code, done.stdout) == (0, answers("hello", max_tokens=9)[0].text + "\n")


@pytest.mark.slow
def test_a_real_answer(run):
    done = run("generate", "smollm2", "What is the capital of France?")
    assert (done.exit_code, done.stdout) == (0, "The capital of France is Paris.\n")


def test_output_goes_where_it_is_told(run, tiny_folder, tmp_path):
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "device"
    real.write_text("before")
    link.symlink_to(real)
    pipe.symlink_to("/dev/null")
    for target in (link, pipe):
        assert run("generate", tiny_folder, "a", "--output", target, "--max-tokens", 1, *ENGINE).exit_code == 0
    assert link.is_symlink() and len(records(real.read_text())) == 1
    assert not Path("/dev/null").is_file()
    for bad in (tmp_path, tmp_path / "no" / "where"):
        done = run("generate", tiny_folder, "a", "--output", bad, "--max-tokens", 1, *ENGINE)
        assert done.exit_code == 2 and "--output" in done.stderr


def test_no_line_can_end_the_others(run, tiny_folder, tmp_path):
    good = b'{"prompt": "a", "max_tokens": 1}'
    lines = [b"\xef\xbb\xbf" + good, b'{"prompt": "\\ud800"}', b"[" * 100000, b'{"prompt": "\xff"}', good]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    done = run("generate", tiny_folder, "--input", tmp_path / "in.jsonl", *ENGINE)
    assert done.exit_code == 2
    found = records(done.stdout)
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5]
    assert ["error" in record for record in found] == [False, True, True, True, False]
