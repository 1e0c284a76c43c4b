"""PromptReader: token ids of texts and conversations, and whether an engine can take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.engine.inference_engine import as_id, check_ids
from phalanx.engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]


class PromptReader:
    """Reads prompts for an engine that need not be in this process.

    Args:
        tokenizer: None for an engine that takes and gives token ids only.
        vocab_size: ids that the model has logits for.
        max_model_len: longest prompt plus answer in tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def ids(self, prompt: Any) -> list[int]:
        """The tokens of a text, special tokens included, or the ids that were given.

        Raises:
            ValueError: neither; no tokens; ids outside the vocabulary; a text that cannot be encoded.
        """
        if isinstance(prompt, str):
            ids = self.encode(prompt, special=True)
            bos = self.tokenizer.bos_token_id
            # A text that begins with the BOS token and a tokenizer that adds it: one is enough.
            ids = ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
            if not ids:
                raise ValueError("the prompt is empty: this model's tokenizer makes no token of it")
        elif isinstance(prompt, Sequence):
            ids = [as_id(value) for value in prompt]
        else:
            raise ValueError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        check_ids(ids, self.vocab_size, "the prompt")
        return ids

    def chat_text(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """A conversation as the model's chat template writes it, special tokens included; ``options`` go to it.

        Raises:
            ValueError: no template, or messages that it does not take.
        """
        if self.tokenizer is None or not (
            getattr(self.tokenizer, "chat_template", None) or options.get("chat_template")
        ):
            raise ValueError("this model has no chat template: use generate with a text")
        if not messages:
            raise ValueError("a conversation without messages: give one at least")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"a message is a dict with 'role' and 'content', given {message!r}")
        arguments = {"add_generation_prompt": True, **options}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))
        except Exception as error:
            # Whatever a template raises (jinja errors, its own raise_exception) is about these messages.
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """The tokens of ``chat_text``: the template owns all special tokens, none is added."""
        return self.encode(self.chat_text(messages, options))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The tokens of a text; with ``special``, those that the tokenizer adds too.

        Raises:
            ValueError: there is no tokenizer, or the text holds half a surrogate pair.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids, or pass tokenizer=")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds half a character, which cannot be encoded: {error}") from None
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def check_length(self, prompt_len: int) -> None:
        """Raises ValueError for a prompt that the context cannot hold, whatever follows it."""
        if prompt_len > self.max_model_len:
            raise ValueError(f"the prompt has {prompt_len} tokens, the limit is {self.max_model_len}: shorten it")

    def max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """How many tokens the answer to a prompt of this length may have.

        Raises:
            ValueError: the context cannot hold the prompt and what was asked for.
        """
        limit = self.max_model_len
        needed = 0 if params.max_tokens == 0 else 1
        if prompt_len + needed > limit:
            raise ValueError(f"the prompt has {prompt_len} tokens, with an answer the limit is {limit}: shorten it")
        rest = limit - prompt_len
        if params.max_tokens is None:
            if params.min_tokens > rest:
                raise ValueError(f"min_tokens={params.min_tokens}, but only {rest} tokens of the context are left")
            return rest
        if params.max_tokens > rest:
            raise ValueError(
                f"the prompt's {prompt_len} tokens and max_tokens={params.max_tokens} are above the context of {limit}"
            )
        return params.max_tokens

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError for settings that this vocabulary, or its absence, cannot honour."""
        for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            wrong = [value for value in ids if not 0 <= value < self.vocab_size]
            if wrong:
                raise ValueError(f"{field}: token id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise ValueError("stop and bad_words are texts, and this model has no tokenizer: use token ids")


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list of prompts.

    Raises:
        ValueError: neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be texts or token ids, not {type(prompts).__name__}")
    many = list(prompts)
    if not many:
        raise ValueError("no prompts were given")
    return [many] if all(isinstance(item, (int, np.integer)) for item in many) else many
