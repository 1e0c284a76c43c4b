"""Every key of DeepSpeed's training config, in three classes; the table of `docs/deepspeed.md` is this one.

A key is *implemented*; or a *hint* about how to compute, which has no effect on what is computed here (accepted, listed
once at start); or *refused* because leaving it out would train something else, or would drop what the user asks for.
A refused key is accepted with the value that means what is done here anyway. Names are dotted paths from the root of
the JSON file. A name of which nothing is listed below is one leaf, whatever it holds.

Source: DeepSpeed 0.19.8, `runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py`,
`runtime/precision_config.py`, `runtime/tensor_parallel/config.py` and the blocks that they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IMPLEMENTED: dict[str, str] = {
    "train_batch_size": "samples of one optimizer step over all data-parallel ranks: micro batch x accumulation x DP",
    "train_micro_batch_size_per_gpu": "samples of one forward on one rank",
    "gradient_accumulation_steps": "forwards of one optimizer step",
    "gradient_clipping": "largest L2 norm of the gradient of the whole model; 0 is off",
    "data_parallel_size": "checked against ranks / autotp_size (DeepSpeed ignores it)",
    "dataloader_drop_last": "of the loader for `training_data`",
    "dump_state": "logs the config at start",
    "zero_allow_untested_optimizer": "allows an optimizer that is not known to be elementwise",
    "optimizer.type": "see *Optimizers*",
    "optimizer.params": "keyword arguments of the optimizer, checked by name",
    "scheduler.type": "see *Schedules*",
    "scheduler.params": "keyword arguments of the schedule, checked by name",
    "bf16.enabled": "bfloat16 parameters, float32 master weights and moments (`bfloat16` is the old name)",
    "bf16.bf16_master_weights_and_grads": "no float32 master weights: half the memory, and small updates are lost",
    "bf16.bf16_optimizer_states": "moments in bfloat16; goes with `bf16_master_weights_and_grads`, both or none",
    "fp16.enabled": "float16 parameters, float32 master weights and moments, loss scaling",
    "fp16.loss_scale": "0 is dynamic, else the constant scale",
    "fp16.initial_scale_power": "the dynamic scale starts at 2 to this power",
    "fp16.loss_scale_window": "steps without overflow before the scale doubles",
    "fp16.hysteresis": "overflows before the scale halves",
    "fp16.consecutive_hysteresis": "a step without overflow refills the hysteresis",
    "fp16.min_loss_scale": "the scale never falls below",
    "data_types.grad_accum_dtype": "dtype in which gradients are summed over micro batches",
    "zero_optimization.stage": "0, 1, 2 or 3; `zero_optimization: true` is 1, `false` is 0",
    "zero_optimization.reduce_bucket_size": "elements of a gradient bucket",
    "zero_optimization.gather_16bit_weights_on_model_save": "what `engine.zero_gather_16bit_weights_on_model_save()` "
    "answers (old names with `stage3_`)",
    "tensor_parallel.autotp_size": "ranks that the model is cut over; 0 and 1 are off",
    "tensor_parallel.partition_config": "how each weight is cut, see *Rules*",
    "tensor_parallel.preset_model": "a named set of rules; an unknown name is refused (DeepSpeed falls through)",
    "tensor_parallel.tp.tp_size": "must be 1 or equal to autotp_size",
    "tensor_parallel.tp.tp_group": "must hold the ranks of the tensor-parallel group",
    "tensor_parallel.verify": "Phalanx's own: `error`, `warn` or `off`; the rules are tried on a small model first",
    "tensor_parallel.sequence_parallel": "Phalanx's own: activations between blocks are cut along the sequence",
    "tensor_parallel.gather_logits": "Phalanx's own: the model returns whole logits",
    "tensor_parallel.tp_overlap_comm": "gradients of weights are computed while those of inputs travel",
    "fused_kernels": "Phalanx's own: RMSNorm, gated SiLU and the loss by a kernel each; default: on GPUs with Triton",
    "chunked_head": "Phalanx's own: tokens that have logits at a time in a training step; 0: all",
}

# A config for the Trainer says "auto" for what the Trainer fills in. Elsewhere it can only stand for a default.
AUTO_IS_DEFAULT = frozenset(
    {
        "data_types.grad_accum_dtype",
        "dataloader_drop_last",
        "zero_allow_untested_optimizer",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "tensor_parallel.preset_model",
        "tensor_parallel.tp.tp_size",
        "tensor_parallel.verify",
        "tensor_parallel.sequence_parallel",
        "tensor_parallel.gather_logits",
        "tensor_parallel.tp_overlap_comm",
        "fused_kernels",
        "chunked_head",
        *(name for name in IMPLEMENTED if name.startswith("fp16.") and name != "fp16.enabled"),
        *(name for name in IMPLEMENTED if name.startswith("bf16.bf16_")),
    }
)

_FETCH = "ZeRO 3 fetches by layer"
_DIAGNOSTIC = "a diagnostic"
_OFFLOAD = "only of offloading"

HINTS: dict[str, str] = {
    "steps_per_print": "nothing is printed; the loop has the loss, `engine.get_lr()` and `get_global_grad_norm()`",
    "wall_clock_breakdown": _DIAGNOSTIC,
    "memory_breakdown": _DIAGNOSTIC,
    "log_level": "set the level of the logger `phalanx`",
    "flops_profiler": _DIAGNOSTIC,
    "comms_logger": _DIAGNOSTIC,
    "timers": _DIAGNOSTIC,
    "disable_python_gc": "when Python collects garbage",
    "vocabulary_size": "DeepSpeed only warns when it is not a multiple of 8",
    "prescale_gradients": "when the mean is divided; the mean is the same",
    "gradient_predivide_factor": "how the division is split; the mean is the same",
    "disable_allgather": "how updated parameters travel",
    "seq_parallel_communication_data_type": "only of Ulysses sequence parallelism, which is refused",
    "use_data_before_expert_parallelism": "only of expert parallelism, which is refused",
    "graph_harvesting": "CUDA graphs of short kernels",
    "compile": "DeepCompile; `engine.compile()` is torch.compile, block by block",
    "aio": _OFFLOAD,
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    "activation_checkpointing": "only of `deepspeed.checkpointing`; use `model.gradient_checkpointing_enable()`",
    "pipeline": "only of `PipelineModule`, which is refused",
    "optimizer.legacy_fusion": "which kernel",
    "bf16.immediate_grad_update": "when gradients are added to the master's",
    "fp16.fused_mode": "which kernel",
    "checkpoint.tag_validation": "a checkpoint's tag comes from one rank",
    "checkpoint.parallel_write": "every rank writes what it holds",
    "checkpoint.writer": "which writer",
    "checkpoint.checkpoint_serialization": "there is one format",
    "zero_optimization.compute_grad_norm": "the norm is always computed",
    "zero_optimization.parameter_alignment": "where parameters start in a bucket",
    "zero_optimization.contiguous_gradients": "buckets are always contiguous",
    "zero_optimization.reduce_scatter": "stages 1 and 2 always reduce-scatter",
    "zero_optimization.use_multi_rank_bucket_allreduce": "how buckets travel",
    "zero_optimization.allgather_partitions": "how updated parameters travel",
    "zero_optimization.allgather_bucket_size": "how updated parameters travel",
    "zero_optimization.overlap_comm": "reductions always overlap with the backward pass",
    "zero_optimization.round_robin_gradients": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.sub_group_size": _OFFLOAD,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OFFLOAD,
    "zero_optimization.elastic_checkpoint": "every checkpoint loads on another number of ranks",
    "zero_optimization.pipeline_loading_checkpoint": "how a checkpoint is read",
    "zero_optimization.zero_hpz_partition_size": "a second copy of the weights inside a node",
    "zero_optimization.mics_hierarchical_params_gather": "only of MiCS, which is refused",
    "zero_optimization.memory_efficient_linear": _FETCH,
    "zero_optimization.override_module_apply": "only of `zero.Init`",
    "zero_optimization.log_trace_cache_warnings": _DIAGNOSTIC,
    "zero_optimization.enable_sanity_checks": _DIAGNOSTIC,
    "zero_optimization.leaf_module": _FETCH,
    **{
        f"zero_optimization.{prefix}{name}": _FETCH
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "partition_stream_chunk_size",
        )
        for prefix in ("", "stage3_")
    },
    "tensor_parallel.dtype": "bf16 and fp16 say the dtype",
    "tensor_parallel.keep_module_on_host": "where the model waits",
    "tensor_parallel.vocab_parallel_lm_head": "the head is cut by vocabulary wherever the rules allow it",
    "tensor_parallel.vocab_parallel_ce_backend": "which kernel",
    "tensor_parallel.tp.tp_grain_size": "cuts fall between heads; the result does not depend on widths",
    "tensor_parallel.tp.mpu": "DeepSpeed ignores it in training; give `mpu` to `initialize`",
}


@dataclass(frozen=True)
class Refusal:
    """Why a key is refused, and the values with which it is not.

    `off` are values that mean what is done here; a block is also accepted when its key `switch` is off.
    """

    note: str
    off: tuple[Any, ...] = (False,)
    switch: str | None = None

    def accepts(self, value: Any) -> bool:
        if value is None or value == "auto":
            return True
        if isinstance(value, dict):
            return not value or (self.switch is not None and value.get(self.switch) in (None, False, "none", "auto"))
        return any(value is off or (type(value) is type(off) and value == off) for off in self.off)

    @property
    def accepted(self) -> str:
        """The values with which the key is accepted, as JSON."""
        if self.switch is not None:
            return '`device: "none"`' if self.switch == "device" else f"`{self.switch}: false`"
        spelled = {False: "false", True: "true", None: "null"}
        words = [spelled[off] if off is None or isinstance(off, bool) else f'"{off}"' for off in self.off] or ["null"]
        if any(isinstance(off, int) and not isinstance(off, bool) for off in self.off):
            words = [str(off) for off in self.off]
        return ", ".join(f"`{word}`" for word in words)


def _block(note: str, switch: str = "enabled") -> Refusal:
    return Refusal(note, switch=switch)


REFUSED: dict[str, Refusal] = {
    "gradient_allreduce_op": Refusal("gradients are averaged over the data-parallel ranks", off=("mean",)),
    "communication_data_type": Refusal("it changes the rounding of reduced gradients", off=()),
    "managed_gradient_accumulation": Refusal(
        "use `engine.set_gradient_accumulation_boundary()` to own the boundary", off=(True,)
    ),
    "sparse_gradients": Refusal("sparse gradients of embeddings are not reduced"),
    "sequence_parallel_size": Refusal(
        "Ulysses sequence parallelism; `tensor_parallel.sequence_parallel` is another kind", off=(1,)
    ),
    "data_types.param_dtype": Refusal("use bf16 or fp16", off=()),
    "data_types.buffer_dtype": Refusal("buffers keep their dtype", off=()),
    "data_types.keep_in_fp32_modules": Refusal("all parameters have the dtype of bf16 or fp16", off=()),
    "bf16.check_grad_overflow": Refusal("steps are skipped on overflow in fp16 only"),
    "fp16.auto_cast": Refusal("cast the inputs in the loop"),
    "fp16.fp16_master_weights_and_grads": Refusal("master weights are float32"),
    "amp": _block("Apex; use bf16 or fp16"),
    "torch_autocast": _block("use bf16 or fp16, or torch.autocast in the loop"),
    "expert_parallel": _block("experts are cut by tensor parallelism"),
    "hybrid_engine": _block("train with `initialize`, serve with `phalanx.LLM`"),
    "elasticity": _block("give the batch sizes"),
    "autotuning": _block("choose the settings"),
    "data_efficiency": _block("sample in the loop"),
    "curriculum_learning": _block("sample in the loop"),
    "progressive_layer_drop": _block("it drops layers at random"),
    "eigenvalue": _block("of quantised training"),
    "quantize_training": _block("quantised training"),
    "compression_training": Refusal("it prunes and quantises", off=()),
    "weight_quantization": Refusal("quantised weights", off=()),
    "sparse_attention": Refusal("it changes the attention; choose it in the model's config", off=()),
    "tensorboard": _block("log from the loop"),
    "wandb": _block("log from the loop"),
    "comet": _block("log from the loop"),
    "csv_monitor": _block("log from the loop"),
    "nebula": _block("a checkpoint service"),
    "datastates_ckpt": Refusal("a checkpoint service", off=()),
    "checkpoint.load_universal": Refusal(
        "universal folders are recognised when they are loaded, and Phalanx's own load at any size"
    ),
    "checkpoint.use_node_local_storage": Refusal("a checkpoint is written to one folder that all ranks see"),
    "zero_optimization.load_from_fp32_weights": Refusal(
        "master weights always come from the float32 weights", off=(True,)
    ),
    "zero_optimization.ignore_unused_parameters": Refusal(
        "a parameter that a step does not use has a zero gradient", off=(True,)
    ),
    "zero_optimization.offload_param": _block("the model would not fit where offloading was planned", "device"),
    "zero_optimization.offload_optimizer": _block("the state would not fit where offloading was planned", "device"),
    "zero_optimization.cpu_offload": Refusal("the state would not fit where offloading was planned"),
    "zero_optimization.cpu_offload_param": Refusal("the model would not fit where offloading was planned"),
    "zero_optimization.zenflow": Refusal("it updates with stale gradients", off=()),
    "zero_optimization.legacy_stage1": Refusal("DeepSpeed refuses it too"),
    "zero_optimization.zero_quantized_weights": Refusal("quantised communication changes the weights"),
    "zero_optimization.zero_quantized_nontrainable_weights": Refusal("it quantises frozen weights"),
    "zero_optimization.zero_quantized_gradients": Refusal("quantised communication changes the gradients"),
    "zero_optimization.zeropp_loco_param": Refusal("quantised communication changes the gradients", off=()),
    "zero_optimization.mics_shard_size": Refusal("MiCS; ZeRO shards over the whole data-parallel group", off=(-1,)),
    "tensor_parallel.injection_policy_tuple": Refusal("name the row layers in partition_config.layer_specs", off=()),
    "tensor_parallel.replace_with_kernel_inject": Refusal("inference kernels do not train"),
}

ALIASES: dict[str, str] = {
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "zero_optimization.gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.gather_16bit_weights_on_model_save"
    ),
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}

NAMES: tuple[str, ...] = (*IMPLEMENTED, *HINTS, *REFUSED)
"""Every leaf, by its first name."""

BLOCKS: frozenset[str] = frozenset(name[:at] for name in NAMES for at, letter in enumerate(name) if letter == ".")
"""Every dotted path that holds leaves."""
