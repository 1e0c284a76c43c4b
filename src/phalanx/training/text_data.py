"""Samples of fixed length from texts and conversations, in an order that any number of ranks draws alike."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.training.recipe import DataRecipe

IGNORED = -100
"""The label of a token that is not learnt (PyTorch's `ignore_index`)."""


class Samples:
    """Token ids and labels, int64 [count, length] each, and which ids are padding.

    Attributes:
        ids, labels, mask: of all samples; labels are IGNORED where nothing is learnt, mask is 0 for padding.
        documents, tokens: what they were made of, padding not counted.
    """

    def __init__(self, ids: np.ndarray, labels: np.ndarray, mask: np.ndarray, documents: int) -> None:
        self.ids, self.labels, self.mask = ids, labels, mask
        self.documents = documents
        self.tokens = int(mask.sum())

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """A batch of these samples, as a causal LM of transformers takes it."""
        index = np.asarray(rows)
        arrays = {"input_ids": self.ids, "labels": self.labels}
        if not self.mask[index].all():
            arrays["attention_mask"] = self.mask
        return {name: torch.from_numpy(array[index].astype(np.int64)).to(device) for name, array in arrays.items()}

    def learnt(self, rows: Sequence[int]) -> int:
        """Targets in these samples: position i is compared with label i + 1."""
        return int((self.labels[np.asarray(rows), 1:] != IGNORED).sum())


def read_samples(recipe: DataRecipe, files: Sequence[str], tokenizer: Any) -> Samples:
    """The samples of files.

    Raises:
        ConfigError: files that are not there, lines that are no documents, or too little text for one sample.
    """
    documents = [_tokens(document, recipe, tokenizer) for document in _documents(recipe, files)]
    length = recipe.sequence_length
    made = _packed(documents, length) if recipe.packing else _padded(documents, length, _padding(tokenizer))
    if not len(made[0]):
        total = sum(len(ids) for ids, _ in documents)
        raise ConfigError(
            f"{', '.join(files)}: {total} tokens do not fill one sample of {length}: lower data.sequence_length, give "
            "more text, or set data.packing to false"
            if recipe.packing
            else f"{', '.join(files)}: nothing to learn within the first {length} tokens of any of {len(documents)} "
            "documents: raise data.sequence_length, give longer texts, or conversations in which the assistant speaks"
        )
    samples = Samples(*made, documents=len(documents))
    if not samples.learnt(range(len(samples))):
        raise ConfigError(
            f"{', '.join(files)}: nothing to learn: in none of the conversations does the assistant speak"
        )
    return samples


def batches(count: int, batch_size: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """The samples of step `start`, `start + 1`, ... without end: all `count`, shuffled anew in each pass, which may end
    within a batch."""
    position = start * batch_size
    orders: dict[int, np.ndarray] = {}
    while True:
        rows = []
        for place in range(position, position + batch_size):
            epoch = place // count
            if epoch not in orders:
                orders = {e: o for e, o in orders.items() if e >= epoch - 1}
                orders[epoch] = np.random.default_rng([seed, epoch]).permutation(count)
            rows.append(int(orders[epoch][place % count]))
        yield rows
        position += batch_size


def _documents(recipe: DataRecipe, files: Sequence[str]) -> Iterator[str | list[Mapping[str, str]]]:
    for pattern in files:
        paths = sorted(glob.glob(pattern)) if any(c in pattern for c in "*?[") else [pattern]
        if not paths:
            raise ConfigError(f"no file is called {pattern}")
        for name in paths:
            try:
                text = Path(name).read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{name} cannot be read as text: {error}") from None
            if Path(name).suffix != ".jsonl":
                yield text
                continue
            # Not splitlines: JSON strings may hold U+2028 and other separators as they are.
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield _document(line, f"{name}, line {number}", recipe)


def _document(line: str, where: str, recipe: DataRecipe) -> str | list[Mapping[str, str]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    text = value.get(recipe.text_field) if isinstance(value, dict) else None
    messages = value.get(recipe.messages_field) if isinstance(value, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return messages
    raise ConfigError(
        f"{where} has neither a text under {recipe.text_field!r} nor messages with roles under "
        f"{recipe.messages_field!r}"
    )


def _tokens(document: str | list[Mapping[str, str]], recipe: DataRecipe, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids and labels of one document."""
    if isinstance(document, str):
        ids = list(tokenizer(document, add_special_tokens=True)["input_ids"])
        end = tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return ids, list(ids)
    ids, labels = [], []
    for count in range(1, len(document) + 1):
        # What the template adds for this message; what the assistant says is learnt, not what makes it speak.
        if document[count - 1]["role"] == "assistant":
            opened = _templated(tokenizer, document[: count - 1], True)
            labels += [IGNORED] * (len(opened) - len(ids))
            ids = opened
        now = _templated(tokenizer, document[:count], False)
        if now[: len(ids)] != ids:
            raise ConfigError(
                "the chat template writes earlier messages otherwise once others follow, so that it cannot be told "
                "what the assistant says: give texts instead of messages"
            )
        fresh = now[len(ids) :]
        labels += fresh if document[count - 1]["role"] == "assistant" else [IGNORED] * len(fresh)
        ids = now
    return ids, labels


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, str]], opens: bool) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the data holds conversations, but this model's tokenizer has no chat template: give texts")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opens)
    except Exception as error:
        raise ConfigError(f"the chat template refuses a conversation: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _padding(tokenizer: Any) -> int:
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _packed(documents: list[tuple[list[int], list[int]]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.fromiter((i for each, _ in documents for i in each), np.int32)
    labels = np.fromiter((i for _, each in documents for i in each), np.int32)
    count = len(ids) // length
    shape = (count, length)
    used = count * length
    return ids[:used].reshape(shape), labels[:used].reshape(shape), np.ones(shape, np.int8)


def _padded(
    documents: list[tuple[list[int], list[int]]], length: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # A document without anything to learn within its length teaches nothing.
    kept = [(ids[:length], labels[:length]) for ids, labels in documents if any(x != IGNORED for x in labels[1:length])]
    shape = (len(kept), length)
    all_ids, all_labels = np.full(shape, padding, np.int32), np.full(shape, IGNORED, np.int32)
    mask = np.zeros(shape, np.int8)
    for row, (ids, labels) in enumerate(kept):
        all_ids[row, : len(ids)], all_labels[row, : len(ids)], mask[row, : len(ids)] = ids, labels, 1
    return all_ids, all_labels, mask
