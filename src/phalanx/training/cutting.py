"""A model is made tensor-parallel, and fast, as a training config says."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from phalanx.distributed.mesh import Mesh
from phalanx.parallel import LayoutRegistry, parallelize
from phalanx.parallel.chunked_head import chunk_head
from phalanx.parallel.fused import fuse
from phalanx.training.config import TrainingConfig


def cut(model: nn.Module, mesh: Mesh, settings: TrainingConfig) -> LayoutRegistry:
    """Cuts `model` in place, and computes parts of it as the config says; gradients of parameters that act inside a
    region are left to the engine to sum.

    Raises what `parallelize` and `chunk_head` raise, ImportError where `fused_kernels` are asked for and Triton is not
    there, and ValueError for a model that torch.compile has wrapped.
    """
    _check_not_wrapped(model)
    rules = settings.tensor_parallel
    registry = parallelize(
        model,
        mesh,
        config=rules.partition_config,
        preset=rules.preset_model,
        verify=rules.verify,
        sequence_parallel=rules.sequence_parallel,
        gather_logits=rules.gather_logits,
        overlap=rules.tp_overlap_comm,
        sum_gradients=False,
    )
    wanted = settings.fused_kernels
    if wanted or (wanted is None and mesh.device.type == "cuda" and find_spec("triton") is not None):
        fuse(model)
    if settings.chunked_head:
        chunk_head(model, settings.chunked_head)
    return registry


def _check_not_wrapped(model: nn.Module) -> None:
    """A wrapper changes the names of parameters: rules would not match them, nothing would load what is exported."""
    wrapped = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "_orig_mod"]
    if wrapped:
        what = wrapped[0].rpartition(".")[0] or "the model"
        raise ValueError(
            f"{what} was wrapped by torch.compile, which changes the names of its parameters: give the model as it "
            "was, and call engine.compile() after"
        )
