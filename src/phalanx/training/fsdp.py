"""ZeRO stage 3: parameters are sharded over the DP ranks as well, through PyTorch's FSDP2 (`fully_shard`).

FSDP2 gathers a layer's parameters before it runs and lets them go after, sums gradients over the ranks in every pass,
and keeps the master values (fp32 in mixed precision) in its shards: rows of each local tensor-parallel shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.blocks import entries
from phalanx.training.fragments import Fragment, count_weights, cut_weights
from phalanx.training.precision import Precision


class FsdpShards:
    """The `GradientShards` of stage 3. All parameters of `module` are sharded, the `trained` ones have fragments.

    FSDP2 replaces the Parameter objects: after this, only names are of use. Before torch 2.13, all DP ranks must use
    the same parameters in a pass, since FSDP2 sums only the gradients that have come; those of no rank are zeros.
    """

    sharded = True
    scale = 1.0  # FSDP2 takes the mean

    def __init__(
        self,
        module: nn.Module,
        trained: Mapping[str, nn.Parameter],
        *,
        mesh: Mesh,
        registry: LayoutRegistry,
        precision: Precision,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._param_dtype = precision.compute
        shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(precision.master_dtype(parameter.dtype))
                if name in trained:
                    mesh.dp.broadcast(parameter.data, 0)
        # Inputs and buffers keep their dtype, as at the other stages.
        policy = MixedPrecisionPolicy(
            precision.compute, precision.reduce_dtype(), output_dtype=None, cast_forward_inputs=False
        )
        devices = DeviceMesh.from_group(mesh.dp_process_group, mesh.device.type, mesh_dim_names=("dp",))
        for layer in layers(module):
            fully_shard(layer, mesh=devices, mp_policy=policy)
        fully_shard(module, mesh=devices, mp_policy=policy)
        for wrapped in self._wrapped():
            if mesh.device.type == "cpu":
                wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            if hasattr(wrapped, "set_reduce_scatter_unused_params"):
                wrapped.set_reduce_scatter_unused_params(True)
        self._parameters = {name: p for name, p in module.named_parameters() if name in trained}
        self._partial = {name for name in trained if registry[name].partial} if mesh.tp.size > 1 else set()
        self.fragments = [
            fragment
            for name, parameter in self._parameters.items()
            if (fragment := _fragment(name, parameter, shapes[name], mesh, registry)) is not None
        ]

    def begin(self, *, reduce: bool) -> None: ...

    def end(self) -> None: ...

    @torch.no_grad()
    def finish(self) -> None:
        for fragment in self.fragments:
            gradient = self._parameters[fragment.name].grad
            fragment.tensor.grad = torch.zeros_like(fragment.tensor) if gradient is None else _local(gradient).flatten()
        partial = [f.tensor.grad for f in self.fragments if f.name in self._partial and f.tensor.grad is not None]
        if partial:
            summed = self._mesh.tp.all_reduce(torch.cat(partial))
            torch._foreach_copy_(partial, list(summed.split([part.numel() for part in partial])))

    def publish(self) -> None:
        # The root stays gathered after a forward without a backward: what it holds then is out of date.
        for wrapped in self._wrapped():
            wrapped.reshard()

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in state.items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
                if self._param_dtype is not None and value.is_floating_point():
                    value = value.to(self._param_dtype)
            found[name] = value
        return found

    def discard(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for fragment in self.fragments:
            fragment.tensor.grad = None

    def destroy(self) -> None:
        self.publish()
        self.discard()
        self._parameters, self.fragments = {}, []

    def _wrapped(self) -> Iterator[FSDPModule]:
        return (module for module in self._module.modules() if isinstance(module, FSDPModule))


def layers(module: nn.Module) -> list[nn.Module]:
    """What is gathered at a time: the entries of the outermost module lists, such as decoder layers.

    One counts if it has submodules (so that it is run by its forward) and parameters, and shares none of them.
    """
    members = [m for m in entries(module) if len(list(m.children())) and len(list(m.parameters()))]
    owners = Counter(id(p) for member in members for p in member.parameters())
    owners.update(id(parameter) for parameter in _without(module, set(members)))
    return [member for member in members if all(owners[id(parameter)] == 1 for parameter in member.parameters())]


def _without(module: nn.Module, members: set[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of `module` that lie outside of `members`."""
    if module not in members:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _without(child, members)


def _fragment(
    name: str, parameter: nn.Parameter, shape: tuple[int, ...], mesh: Mesh, registry: LayoutRegistry
) -> Fragment | None:
    """This rank's rows of a parameter, the memory of FSDP2's shard itself; None where it has none."""
    local = _local(parameter.data)
    if not local.numel():
        return None
    inner = local.numel() // local.shape[0]
    # FSDP2 cuts as torch.chunk does: all ranks but the last ones have ceil(rows / ranks).
    start = mesh.dp.rank * -(-shape[0] // mesh.dp.size) * inner
    stop = start + local.numel()
    count = count_weights(registry, name, shape, mesh.device)
    return Fragment(name, start, stop, nn.Parameter(local.view(-1)), cut_weights(count, start, stop, (stop - start,)))


def _local(t: Tensor) -> Tensor:
    if not isinstance(t, DTensor):
        raise RuntimeError(f"expected FSDP2's shard of a parameter, found a {type(t).__name__}")
    return t.to_local()
