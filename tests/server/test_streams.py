"""Streamed texts concatenate to the whole ones, whatever they are made of."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.server.running import Server, events

pytestmark = pytest.mark.xdist_group("server")
ALPHABETS = ["hello the tell ", "😀👩‍👩‍👧🇩🇪❤️", "漢字かな交じり文、", "éßñøлдж", "\n\t  ", "العربية"]


def request(dice: random.Random) -> dict[str, Any]:
    """A random prompt of several scripts, with settings that keep the answer varied."""
    alphabet = "".join(dice.sample(ALPHABETS, 3))
    prompt = "".join(dice.choice(alphabet) for _ in range(dice.randint(1, 60)))
    return {
        "prompt": prompt,
        "max_tokens": dice.randint(1, 60),
        "temperature": dice.choice([0, 0.7, 1.5]),
        "seed": dice.getrandbits(30),
        "ignore_eos": dice.random() < 0.5,
        "skip_special_tokens": dice.random() < 0.5,
    }


def texts(answer: Any) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_streamed_texts_are_the_whole_ones(server: Server, count: int) -> None:
    dice = random.Random(count)
    for _ in range(count):
        asked = request(dice)
        whole = server.complete(**asked).json()
        if len(text := whole["choices"][0]["text"]) > 4:
            # A stop text out of the middle, which falls across tokens as it likes.
            place = dice.randrange(len(text) - 2)
            stop = text[place : place + dice.randint(1, 3)]
            if "\ufffd" not in stop and dice.random() < 0.7:
                asked["stop"] = [stop, "another"]
                whole = server.complete(**asked).json()
                assert stop not in whole["choices"][0]["text"]
        streamed: dict[int, str] = {}
        reason = None
        for chunk in events(server.complete(**asked, stream=True)):
            for choice in chunk["choices"]:
                streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
                reason = choice["finish_reason"] or reason
        assert [(streamed.get(0, ""), reason)] == texts(whole), asked
