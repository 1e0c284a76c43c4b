"""The loader that `initialize(training_data=...)` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from phalanx.distributed.mesh import Mesh


class ShardedLoader(DataLoader[Any]):
    """Batches of one data-parallel rank: shuffled by the same seed on all ranks, anew in each pass, cut by DP rank.

    The ranks of a tensor-parallel group get the same batches. The last ones are filled up with samples from the start,
    so that every rank has as many (as DeepSpeed's loader does). `set_epoch` chooses the order of the next pass.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        mesh: Mesh,
        *,
        batch_size: int,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"training_data must be a dataset with a length and samples by index, not {type(dataset).__name__}: "
                "it is shared out over the data-parallel ranks by index. Make a DataLoader of your own for this one"
            )
        self._order: DistributedSampler[Any] = DistributedSampler(dataset, mesh.dp.size, mesh.dp.rank)
        self._pass = 0
        super().__init__(
            dataset, batch_size=batch_size, sampler=self._order, drop_last=drop_last, collate_fn=collate_fn
        )

    def set_epoch(self, epoch: int) -> None:
        """The next pass is pass number `epoch`."""
        self._pass = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._order.set_epoch(self._pass)
        self._pass += 1
        return super().__iter__()
