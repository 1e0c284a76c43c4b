"""The model-parallel unit that Megatron and DeepSpeed ask for their ranks, over a mesh."""

from __future__ import annotations

from typing import Any

from phalanx.distributed.mesh import Mesh


class MeshUnit:
    """`get_{tensor_model,model,data}_parallel_{rank,world_size,group}` of a mesh; a group is None for a side of one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.tp.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.tp.size

    def get_tensor_model_parallel_group(self) -> Any:
        return self._mesh.tp_process_group

    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp.size

    def get_data_parallel_group(self) -> Any:
        return self._mesh.dp_process_group
