import json

import pytest

from phalanx import LLM
from phalanx.cli.jobs import Job, read_jobs, run_jobs


def parsed(*lines):
    return list(read_jobs(lines))


def test_lines_become_jobs():
    jobs = parsed(
        '{"prompt": "text", "id": 7, "max_tokens": 3}',
        "",
        '{"prompt": [1, 2]}',
        '{"messages": [{"role": "user", "content": "hi"}], "prompt": null}',
    )
    conversation = [{"role": "user", "content": "hi"}]
    assert jobs == [Job(1, "text", {"max_tokens": 3}, 7), Job(3, [1, 2]), Job(4, conversation)]
    assert [job.is_conversation for job in jobs] == [False, False, True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not JSON: Expecting value"),
        ("[1, 2]", "a line is a JSON object, this is a list"),
        ("{}", "neither is there"),
        ('{"prompt": "a", "messages": []}', "both are there"),
        ('{"messages": "hi"}', "'messages' is a list of objects"),
        ('{"messages": []}', "'messages' is a list of objects"),
        ('{"messages": ["hi"]}', "'messages' is a list of objects"),
    ],
)
def test_bad_lines_keep_their_number_and_say_what_is_wrong(line, message):
    first, bad = parsed('{"prompt": "a"}', line)
    assert first.error is None and bad.line == 2 and message in bad.error


def test_records_come_in_the_order_of_the_jobs_and_each_as_early_as_can_be(tiny_folder):
    lengths = [9, 1, 5, 2, 8, 1, 1, 3, 4, 1]
    jobs = [Job(place + 1, [5, 6, 7 + place], {"max_tokens": length}) for place, length in enumerate(lengths)]
    jobs[4] = Job(5, "x" * 999)
    found = []
    with LLM(tiny_folder, num_blocks=64, max_num_seqs=2) as llm:
        # What is read of the input while it runs shows that a long one is not taken in at once.
        reached = []
        run_jobs(
            llm, (reached.append(job) or job for job in jobs), {}, False, lambda r: found.append((r, len(reached)))
        )
        llm.core.check_idle()
    assert [record["line"] for record, _ in found] == list(range(1, 11))
    assert found[0][1] < len(jobs)
    for (record, _), length in zip(found, lengths, strict=True):
        if record["line"] == 5:
            assert "the limit is" in record["error"]["message"]
        else:
            assert len(record["outputs"][0]["token_ids"]) == length and "error" not in record
    json.dumps([record for record, _ in found])


def test_a_jobs_own_settings_win(tiny_folder):
    found = []
    with LLM(tiny_folder, num_blocks=64, max_num_seqs=2) as llm:
        jobs = [Job(1, [5]), Job(2, [5], {"max_tokens": 2, "logprobs": 1})]
        run_jobs(llm, jobs, {"max_tokens": 4}, False, found.append)
    first, second = (record["outputs"][0] for record in found)
    assert len(first["token_ids"]) == 4 and "logprobs" not in first
    assert len(second["token_ids"]) == len(second["logprobs"]) == 2
