"""What of the training engine gives whole weights away."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phalanx.training import adapter_export, export
from phalanx.training.whole import gathered_parameters


class Exports:
    """Methods of `TrainingEngine`. All ranks call them; an error on one is an error on all."""

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights, in the dtype that the model computes in, into `save_dir`; no config.

        They are always safetensors: the ending of `save_filename` becomes `.safetensors`, and `pytorch_model` becomes
        `model`, the name that `from_pretrained` looks for. More than 5 GB become several files with an index.
        """
        engine: Any = self
        export.save_weights(engine, Path(save_dir), save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    def save_pretrained(
        self,
        save_dir: str | os.PathLike[str],
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        merge_adapters: bool = False,
    ) -> None:
        """Write the model as a folder that stock transformers loads: whole weights, config, generation config.

        Of a model that PEFT has wrapped only the adapter is written, as stock PEFT files.

        Args:
            merge_adapters: of such a model, write the model itself, with its active LoRA adapters added to its weights.
            tokenizer: saved along; anything that has `save_pretrained`.
            max_shard_size: of a weight file, in bytes or such as "5GB". Rank 0 holds this much at a time.

        Raises ValueError for a module without a config of transformers, and for adapters that cannot be merged.
        """
        engine: Any = self
        adapted = adapter_export.is_adapted(engine.module)
        if merge_adapters and not adapted:
            raise ValueError(f"merge_adapters: {type(engine.module).__name__} has no adapters of PEFT")
        if merge_adapters:
            adapter_export.save_merged(engine, Path(save_dir), tokenizer, max_shard_size)
        elif adapted:
            adapter_export.save_adapter(engine, Path(save_dir), tokenizer)
        else:
            export.save_model(engine, engine.module, Path(save_dir), tokenizer, max_shard_size)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The whole state dict, parameters and buffers, on the CPU of rank 0, under the module's names; None on the
        other ranks. (It is DeepSpeed's name; transformers calls it.)"""
        engine: Any = self
        return export.consolidated(engine, exclude_frozen=exclude_frozen_parameters)

    def gathered_parameters(
        self, params: str | nn.Parameter | Sequence[str | nn.Parameter], modifier_rank: int | None = None
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """`with engine.gathered_parameters(names, modifier_rank=0) as whole:` whole parameters on all ranks, by name.

        They are copies, of the master values (fp32 in mixed precision) where a parameter is trained. With
        `modifier_rank`, what this rank (of all) has changed in them in place goes to all ranks at the end: to the
        shards, the master values and what the model computes with. Without it, changes are lost.

        Args:
            params: Parameters of `module`, or their names.
        """
        engine: Any = self
        given = [params] if isinstance(params, (str, nn.Parameter)) else list(params)
        return gathered_parameters(engine, given, modifier_rank)
