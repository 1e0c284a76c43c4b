"""LLM: prompts in, answers out. The scheduler and the loop on top of an InferenceEngine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phalanx.config import EngineConfig, engine_config
from phalanx.distributed.group import Group
from phalanx.engine.build import assemble_engine
from phalanx.engine.core import EngineCore
from phalanx.engine.executor import RemoteError
from phalanx.engine.guides import GuideCompiler
from phalanx.engine.offered_weights import Weights
from phalanx.engine.opened_model import OpenedModel
from phalanx.engine.outputs import Chunk, RequestOutput
from phalanx.engine.pooling import Pooling
from phalanx.engine.prompts import Prompt, as_prompts
from phalanx.engine.request_group import RequestGroup
from phalanx.engine.requests import RequestMaker
from phalanx.engine.sampling_params import SamplingParams, sampling_params
from phalanx.engine.statistics import EngineStatistics
from phalanx.engine.step import Fail, Return
from phalanx.engine.weight_update import WeightUpdate

log = logging.getLogger("phalanx")

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers. Not for use from several threads at once; ``AsyncLLM`` is.

    Under torchrun with as many ranks as ``tensor_parallel_size``, every rank makes the same calls and gets rank 0's
    results.

    Args:
        model: "smollm2", a folder, a GGUF file, a hub id, or an ``nn.Module`` of transformers.
        config, overrides: settings of EngineConfig, e.g. ``LLM(path, tensor_parallel_size=2, dtype="bfloat16")``.
        tokenizer: a tokenizer or where to find one; default: the model's own.
        hf_config: the model's config, for sources that carry none.
        group: ranks that the user has brought together; every rank makes the same calls then.

    Raises:
        ConfigError, ModelConfigError, WeightError: bad settings, an unsupported model, unusable weights; all by name.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig | dict[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        hf_config: Mapping[str, Any] | None = None,
        group: Group | None = None,
        **overrides: Any,
    ) -> None:
        settings = engine_config(config, **overrides)
        opened = OpenedModel(model, hf_config, tokenizer)
        self.engine, self._team = assemble_engine(opened, settings, group, scheduled=True)
        self.config = self.engine.model.engine_config
        self.tokenizer = opened.tokenizer()
        self.name = opened.name
        asynchronous = settings.loop == "async" or (settings.loop == "auto" and self.engine.model.device.type != "cpu")
        self.core = EngineCore(self.engine, asynchronous)
        self._maker = RequestMaker(self.engine, self.tokenizer, opened.eos_token_ids(), settings)
        self._groups: dict[str, RequestGroup] = {}
        self._update: WeightUpdate | None = None
        self._names = itertools.count()
        if self.max_model_len < self.engine.model.max_sequence_length:
            log.info(
                "the context is %d tokens (the model's own: %d)",
                self.max_model_len,
                self.engine.model.max_sequence_length,
            )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer in tokens: the model's limit, the settings' or the KV pool's, the least."""
        return self.engine.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self._maker.eos_ids

    # -- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | dict[str, Any] | None = None,
        *,
        cache_salt: str = "",
        on_finish: Callable[[RequestOutput], None] | None = None,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many (texts or token ids), in their order.

        Args:
            params: one for all, or one a prompt; keywords change single fields: ``generate(text, max_tokens=20)``.
            cache_salt: requests share cached prompts only with those of the same salt.
            on_finish: told of each prompt that is done, as it is.

        Raises:
            ValueError: a bad prompt or setting, before anything runs. A request that fails while it runs has the finish
                reason "error" instead; the others go on.
        """
        many = as_prompts(prompts)

        def call() -> list[RequestOutput]:
            each = self._params_of(params, len(many), overrides)
            return self._run(
                many, lambda name, index: self._maker.make(name, many[index], each[index], cache_salt), on_finish
            )

        return self._on_every_rank(call)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | dict[str, Any] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        on_finish: Callable[[RequestOutput], None] | None = None,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Answers to a conversation, or to several: lists of ``{"role": ..., "content": ...}``.

        The model's chat template makes the prompt, special tokens included; ``template_options`` go to it.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        many: Any = messages if several else [messages]
        prompts = [self._maker.prompts.chat_ids(one, template_options or {}) for one in many]
        return self.generate(prompts, params, cache_salt=cache_salt, on_finish=on_finish, **overrides)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last", *, cache_salt: str = ""
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """The embeddings of one prompt or many: float32 [hidden_size], 1 long, in their order.

        Args:
            pooling: the hidden state, behind the model's last norm, of a prompt's "last" token, or the "mean" of all.

        Raises:
            ValueError: a bad prompt or pooling. RuntimeError: hidden states that are not finite.
        """
        many, nothing = as_prompts(prompts), SamplingParams()
        outputs = self._on_every_rank(
            lambda: self._run(
                many, lambda name, index: self._maker.make(name, many[index], nothing, cache_salt, pooling), None
            )
        )
        for output in outputs:
            if output.embedding is None:
                raise RuntimeError(f"{output.request_id} has no embedding: {output.outputs[0].error}")
        return [np.array(output.embedding, np.float32) for output in outputs]

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """The answer to one prompt (or conversation) as it comes. Leaving the iterator early aborts the request.

        Raises:
            ValueError: a bad prompt or setting, at the call. RuntimeError: under torchrun (use ``generate``).
        """
        self._check_alone()
        setting = sampling_params(params, **overrides)
        self.engine.check_open()
        name = f"request-{next(self._names)}"
        return self._chunks(self._maker.make(name, self.prompt_of(prompt, template_options), setting, cache_salt))

    # -- one step at a time

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        pooling: str | None = None,
    ) -> str:
        """Queues a prompt for ``step`` and returns its request id. With ``pooling``, its embedding is what is wanted.

        Raises:
            ValueError: a bad prompt or setting, or an id that is in use. RuntimeError: the engine was closed, or this
                is one of several ranks that the user started (use ``generate``).
        """
        self.engine.check_open()
        self._check_alone()
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        if name in self._groups:
            raise ValueError(f"request id {name!r} is in use")
        self._start(self._maker.make(name, prompt, sampling_params(params), cache_salt, pooling or ""))
        return name

    def prompt_of(self, prompt: Prompt | Messages, template_options: Mapping[str, Any] | None = None) -> Prompt:
        """The token ids that the chat template makes of a conversation; any other prompt as it is."""
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self._maker.prompts.chat_ids(prompt, template_options or {})  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def group_of(self, request_id: str) -> RequestGroup:
        """The requests of an id that runs or waits."""
        return self._groups[request_id]

    def step(self) -> list[RequestGroup]:
        """Runs the engine once; returns the groups that got tokens or ended. Finished ones are forgotten."""
        self.engine.check_open()
        touched = self.core.step()
        known = self._groups
        groups = [known[name] for name in dict.fromkeys([request.request_id for request in touched]) if name in known]
        for request in touched:
            group = known.get(request.request_id) if request.is_finished else None
            if group is not None and group.finished:
                del known[request.request_id]
        return groups

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and finished ones are left alone."""
        group = self._groups.pop(request_id, None)
        for request in group.requests if group is not None else ():
            self.core.abort(request)

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.core.has_work

    def stats(self) -> EngineStatistics:
        """What runs, what waits and what the KV pool holds now, and counts since the start."""
        return EngineStatistics.of(self.core)

    def update_weights(self, weights: Weights, group: Group | None = None) -> None:
        """Other weights for the same model, from the memory of the ranks that train it; cached prompts are forgotten.

        Called at the same time by all ranks of ``group`` and of this engine.

        Args:
            weights: tensor name -> (how it is cut over ``group``, this rank's shard), as ``TrainingEngine.shards()``.
            group: the ranks that together hold one model (those of tensor parallelism in training); default: the
                engine's own. A group of one: every rank holds all.

        Raises:
            RuntimeError: requests run or wait, the engine was closed, or it started its ranks by itself.
            ValueError, WeightError: weights that are not of this model, or not like those of the first update. What is
                wrong on one rank is raised on all of them, and the old weights stay.
        """
        self.engine.check_open()
        if self._team.ranks is not None:
            raise RuntimeError(
                "update_weights: this engine started its ranks by itself, so they cannot be given shards; make it on "
                "all ranks of the training run, with group="
            )
        if self._update is None:
            self._update = WeightUpdate(self.engine.model, self.engine.policy_name, self.engine.group)
        try:
            self._update(weights, self.engine.group if group is None else group, busy=self.has_work)
        finally:
            # Also where a rank has died half-way: what is cached belongs to the weights before.
            self.engine.kv.pool.drop_cached()
        self.engine.group.barrier()

    def serialize(self, folder: str | Path) -> None:
        """Writes the engine as it is served, and the tokenizer beside it: ``LLM(folder)`` reads both again.

        Raises:
            RuntimeError: the engine was closed.
        """
        self.engine.serialize(folder)
        if self.tokenizer is not None and self._team.group.rank == 0:
            self.tokenizer.save_pretrained(str(folder))

    def close(self) -> None:
        """Ends the engine and the ranks that it started, and lets its memory go. Closing twice is fine."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @property
    def guides(self) -> GuideCompiler:
        """Compiles guides, from any thread; a request whose guide it knows begins at once.

        Raises:
            ValueError: a model without a tokenizer, or with one that guides cannot read.
        """
        return self._maker.guides

    # -- inside

    def _run(
        self,
        many: Sequence[Prompt],
        make: Callable[[str, int], RequestGroup],
        on_finish: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """Runs what ``make(name, index)`` makes of each prompt."""
        groups = []
        for index in range(len(many)):
            try:
                groups.append(make(f"request-{next(self._names)}", index))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(many) > 1 else str(error)) from None
        for group in groups:
            self._start(group)
        try:
            waiting = {group.request_id: group for group in groups}
            while waiting:
                # Nothing touched: another caller's step may have finished ours.
                for group in self.step() or list(waiting.values()):
                    if group.finished and group.request_id in waiting:
                        del waiting[group.request_id]
                        if on_finish is not None:
                            on_finish(group.output())
        except BaseException:
            for group in groups:
                self.abort(group.request_id)
            raise
        return [group.output() for group in groups]

    def _params_of(self, params: Any, count: int, overrides: dict[str, Any]) -> list[SamplingParams]:
        if isinstance(params, Sequence):
            if len(params) != count:
                raise ValueError(f"{len(params)} sampling settings for {count} prompts: give one, or one a prompt")
            return [sampling_params(one, **overrides) for one in params]
        return [sampling_params(params, **overrides)] * count

    def _start(self, group: RequestGroup) -> None:
        self._groups[group.request_id] = group
        for request in group.requests:
            self.core.add(request)

    def _chunks(self, group: RequestGroup) -> Iterator[Chunk]:
        # It starts with the first chunk that is asked for: an iterator that nobody uses costs nothing.
        self._start(group)
        try:
            done = False
            while not done:
                if not group.finished:
                    self.step()
                done = group.finished
                yield from group.chunks()
        finally:
            self.abort(group.request_id)

    def _on_every_rank(self, call: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Runs a call on rank 0; the other ranks of a torchrun follow and get its result, or its error."""
        self.engine.check_open()
        if not self._team.spmd:
            try:
                return call()
            except BaseException:
                self._close_if_broken()
                raise
        executor = self.engine.executor
        if self._team.group.rank > 0:
            message = executor.follow()
            if not isinstance(message, Return):
                raise RemoteError("EngineClosed", "the engine was closed during a call")
            return msgspec.msgpack.decode(message.payload, type=list[RequestOutput])
        try:
            result = call()
        except Exception as error:
            executor.send(Fail(type(error).__name__, str(error)))
            raise
        executor.send(Return(msgspec.msgpack.encode(result)))
        return result

    def _check_alone(self) -> None:
        """Single steps are rank 0's to make: where the user started all ranks, the others could not follow them."""
        if self._team.spmd:
            raise RuntimeError(
                "single requests and streams are not for ranks that the user started: use generate or chat, or let LLM "
                "start the ranks"
            )

    def _close_if_broken(self) -> None:
        """A group that has failed cannot go on: its processes are ended."""
        try:
            self._team.group.check()
        except RuntimeError:
            self.close()
