import pytest

from phalanx.bench.workload import draw, parse_range


def test_drawn_lengths_and_tokens_are_within_their_ranges_and_repeatable():
    drawn = draw(200, range(3, 9), range(1, 4), vocab_size=11, seed=5)
    assert drawn == draw(200, range(3, 9), range(1, 4), vocab_size=11, seed=5)
    assert drawn != draw(200, range(3, 9), range(1, 4), vocab_size=11, seed=6)
    assert {len(prompt) for prompt in drawn.prompts} == set(range(3, 9)) and set(drawn.output_lens) == {1, 2, 3}
    assert {token for prompt in drawn.prompts for token in prompt} == set(range(11))
    assert drawn.output_tokens == sum(drawn.output_lens)
    assert drawn.prompt_tokens == sum(len(prompt) for prompt in drawn.prompts)
    assert drawn.longest == max(len(p) + n for p, n in zip(drawn.prompts, drawn.output_lens, strict=True))


@pytest.mark.parametrize(("text", "first", "last"), [("16:512", 16, 512), ("64", 64, 64), ("1:1", 1, 1)])
def test_ranges_include_both_ends(text, first, last):
    assert parse_range(text) == range(first, last + 1)


@pytest.mark.parametrize("text", ["", "0", "0:4", "5:4", "a:b", "4:", ":4", "-1", "1:2:3", "1.5"])
def test_odd_ranges_are_refused(text):
    with pytest.raises(ValueError, match="is not a range of lengths"):
        parse_range(text)
