"""Tensor parallelism, data parallelism and ZeRO for the Trainer of transformers and those that are built on it.

class MyTrainer(TPTrainerMixin, Trainer): ...

MyTrainer(model=model, args=TrainingArguments(...), phalanx_config={"tensor_parallel": {"autotp_size": 2}})
"""

from __future__ import annotations

import functools
import inspect
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.config import ConfigError
from phalanx.distributed.mesh import Mesh
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.adapter_export import is_adapted
from phalanx.training.config import TrainingConfig
from phalanx.training.cutting import cut
from phalanx.training.engine import TrainingEngine
from phalanx.training.fused_head import join_head, scores_tokens
from phalanx.training.hf_accelerator import MeshAccelerator
from phalanx.training.hf_config import check_arguments, fill_length, filled, tp_size_of
from phalanx.training.optimizers import optimizer_maker
from phalanx.training.precision import Precision
from phalanx.training.schedules import schedule_maker
from phalanx.training.setup import place
from phalanx.training.trained_model import TrainedModel

# As the Trainer calls them.
SCHEDULER_FILE, ARGUMENTS_FILE = "scheduler.pt", "training_args.bin"


class TPTrainerMixin:
    """Put before a Trainer class: `class MyTrainer(TPTrainerMixin, Trainer)`. Every rank runs the same script.

    The model is cut over `tensor_parallel.autotp_size` ranks; the copies that so arise share the data out. Everything
    that the Trainer reports counts a copy once. Arguments are the Trainer's, and:

    phalanx_config: a DeepSpeed config (a dict, the path of a JSON file, or base64; `{}` if left out). What
    TrainingArguments know may be `"auto"` or left out; what is there must not contradict them.
    tokenizer: what `processing_class` was called in transformers 4; a Trainer that takes it by this name gets it so.

    Raises ConfigError (a ValueError) for a config or arguments that cannot be followed.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, phalanx_config: Mapping[str, Any] | str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        self._given_config = {} if phalanx_config is None else phalanx_config
        self._registries: WeakKeyDictionary[nn.Module, LayoutRegistry] = WeakKeyDictionary()
        self._flops_scale = 1.0
        self._random_at_checkpoint: tuple[Any, ...] | None = None
        if "tokenizer" in kwargs and not _takes_tokenizer(type(self)):
            if kwargs.get("processing_class") is not None:
                raise ConfigError("tokenizer is the old name of processing_class: give one of them")
            kwargs["processing_class"] = kwargs.pop("tokenizer")
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> TrainingEngine | None:
        """The engine that trains the model; None before `train`."""
        wrapped = getattr(self, "model_wrapped", None)
        return wrapped.engine if isinstance(wrapped, TrainedModel) else None

    # How it is set up.

    def create_accelerator_and_postprocess(self) -> None:
        world = self.args.world_size
        given = filled(self._given_config, self.args, world_size=world)
        check_arguments(self.args, tp_size_of(given))
        # The schedule needs the length of the run, which is not known yet.
        self._schedule = given.pop("scheduler", None)
        self._settings = TrainingConfig.read(given, world_size=world)
        if self.args.process_index == 0:
            self._settings.log_hints()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.mesh = Mesh.build(self._settings.tp_size, self.args.device)
        self.accelerator = MeshAccelerator.of(self.accelerator, self.mesh, self._make_engine, self._cut_for_evaluation)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The engine casts, and keeps float32 masters; autocast around it would cast again.
        loaders = kwargs["dataloader_config"]
        if loaders.dispatch_batches is None:
            loaders.dispatch_batches = False  # a batch that rank 0 cuts up would be cut over all ranks
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        return {**built, "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model moves after it is cut: a device need not hold the whole."""

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        model = self.model if model is None else model
        self._cut(model)
        named = self._settings.optimizer
        if self.optimizer is None and named is not None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self.optimizer = optimizer_maker(named.type, named.params)(trained)
        made: Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        if self.lr_scheduler is None and self._schedule is not None:
            config = {"scheduler": self._schedule}
            fill_length(config, self.args, num_training_steps)
            make = schedule_maker(config["scheduler"]["type"], config["scheduler"].get("params", {}))
            held = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = make(getattr(held, "optimizer", held))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def _cut(self, model: nn.Module) -> LayoutRegistry:
        """The layouts of `model`, which is cut in place, once."""
        if model not in self._registries:
            rules = self._settings.tensor_parallel
            scored = [module for module in model.modules() if scores_tokens(module)] if self.mesh.tp.size > 1 else []
            if scored and rules.sequence_parallel:
                raise ValueError(
                    "tensor_parallel.sequence_parallel: TRL reads hidden states of all tokens in front of the output "
                    "head, where a rank has some of them only; switch it off"
                )
            count = getattr(model, "num_parameters", lambda **_: 1)
            whole = count(exclude_embeddings=True)
            self._registries[model] = cut(model, self.mesh, self._settings)
            for module in scored:
                join_head(module)
            self._flops_scale = whole / max(1, count(exclude_embeddings=True)) / self._settings.tp_size
        return self._registries[model]

    def _cut_for_evaluation(self, model: nn.Module) -> nn.Module:
        self._cut(model)
        place(model, self.mesh)
        Precision.of(self._settings).cast(model, set())
        return model

    def _make_engine(self, model: nn.Module, optimizer: Optimizer) -> TrainingEngine:
        if (old := self.engine) is not None:
            old.destroy()
        return TrainingEngine(
            model, config=self._settings, mesh=self.mesh, registry=self._cut(model), optimizer=optimizer
        )

    # What is counted.

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an update: a copy of the model counts once."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.mesh.dp.size)  # type: ignore[attr-defined]

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's share, so that the sum over all ranks is the model's."""
        whole: float = super().floating_point_ops(inputs)  # type: ignore[misc]
        return whole * self._flops_scale

    # What is saved and loaded.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._trained("saving a checkpoint")
        engine.save_checkpoint(output_dir, exclude_frozen_parameters=is_adapted(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))

    def _save_rng_state(self, output_dir: str) -> None:
        """They are in the engine's checkpoint."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the engine's checkpoint, when the engine is there."""
        if not Path(resume_from_checkpoint, "latest").is_file():
            raise ValueError(
                f"{resume_from_checkpoint} cannot be resumed: there is no training state of Phalanx in it (saved with "
                "save_only_model, or by another Trainer). To start from its weights, load the model from it"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine = self._trained("resuming")
        engine.load_checkpoint(checkpoint, load_module_strict=not is_adapted(self.model))
        self._random_at_checkpoint = _random_state()
        states = torch.load(os.path.join(checkpoint, SCHEDULER_FILE), map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(states)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on drawing where the checkpoint was made: data that was skipped has drawn since it was loaded."""
        if checkpoint is not None and self._random_at_checkpoint is not None:
            _set_random_state(self._random_at_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        engine = self._trained("loading the best model")
        engine.load_checkpoint(best, load_module_strict=not is_adapted(self.model), load_module_only=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (of a PEFT model, the adapter) as Hugging Face files; called by all ranks."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.engine is None:
            raise RuntimeError("save_model before train: nothing has changed since the model was loaded")
        collator = self.data_collator  # type: ignore[attr-defined]
        processing = self.processing_class or getattr(collator, "tokenizer", None)  # type: ignore[attr-defined]
        self.engine.save_pretrained(output_dir, tokenizer=processing)
        if self.args.should_save:
            torch.save(self.args, os.path.join(output_dir, ARGUMENTS_FILE))
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _trained(self, what: str) -> TrainingEngine:
        if self.engine is None:
            raise RuntimeError(f"{what} needs a model that is being trained: call train() first")
        return self.engine


def _takes_tokenizer(kind: type) -> bool:
    """Whether a Trainer behind the mixin has an argument of this name."""
    return any("tokenizer" in inspect.signature(each).parameters for each in kind.__mro__[:-1])


def _random_state() -> tuple[Any, ...]:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def _set_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
