"""Every variant of every family equals transformers: one-shot, by 7, token by token, at TP 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from tests.models.families import CASES, LENGTH, folder_of
from tests.models.tiny import chunked, error, reference

PATTERNS = {
    "prompt and decode": [LENGTH - 2, 1, 1],
    "by 7": chunked(LENGTH, 7),
    "one-shot": [LENGTH],
    "by 1": [1] * LENGTH,
}
"""How a sequence is given; at TP 2 the first two, at TP 4 the first."""

LENGTH_DEPENDENT = ("dynamic", "longrope")


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    module, folder = folder_of(case, tmp_path)
    ids = torch.randint(3, 131, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    patient = any(kind in case for kind in LENGTH_DEPENDENT)
    one_shot = reference(module, ids, [LENGTH])
    expected = {name: reference(module, ids, chunks) if patient else one_shot for name, chunks in PATTERNS.items()}

    def run(group: Group) -> dict[str, torch.Tensor]:
        engine = build_engine(folder, group=group, tensor_parallel_size=group.size, num_blocks=60, block_size=8)
        found = {}
        for uid, name in enumerate(list(PATTERNS)[: 4 // group.size]):
            parts, start = [], 0
            for size in PATTERNS[name]:
                parts.append(engine.put([uid], [ids[start : start + size]], logits="all"))
                start += size
            engine.flush(uid)
            found[name] = torch.cat(parts)
        return found

    for world in (1, 2, 4):
        for rank, found in enumerate(run_threads(world, run)):
            for name, logits in found.items():
                assert error(logits, expected[name]) < 1e-4, (case, world, rank, name)


@pytest.mark.parametrize(
    "case",
    [
        "exaone4:hybrid",
        "falcon:rw",
        "gemma3_text:two-ropes",
        "olmo2:plain",
        "opt:norm-after",
        "phi3:longrope",
        "stablelm:normed-heads",
    ],
)
def test_a_ragged_batch_equals_each_sequence_alone(case: str, tmp_path: Path) -> None:
    module, folder = folder_of(case, tmp_path)
    engine = build_engine(folder, num_blocks=120, block_size=8)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 7, 12, 30, LENGTH]
    texts = [torch.randint(3, 131, (length + 3,), generator=generator).tolist() for length in lengths]
    both = list(zip(texts, lengths, strict=True))
    steps = [engine.put(range(len(both)), [text[:length] for text, length in both])]
    steps += [engine.put(range(len(both)), [[text[length + k]] for text, length in both]) for k in range(3)]
    for index, (text, length) in enumerate(both):
        alone = reference(module, text, [length, 1, 1, 1])[length - 1 :]
        assert error(torch.stack([step[index] for step in steps]), alone) < 1e-4, length
