"""ZeRO stages 0, 1 and 2 on flat buckets.

                    gradients are summed over DP ranks      a rank owns
    stage 0         in the last pass of a step              everything (all-reduce)
    stage 1         in the last pass of a step              a part (reduce-scatter)
    stage 2         in every pass, then let go              a part (reduce-scatter)

A bucket's sum starts in the middle of the backward pass, as soon as the bucket is full. All ranks start the sums in the
order of the buckets, whichever is full first, since a collective must meet the same one on the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.mesh import Mesh
from phalanx.parallel.registry import LayoutRegistry
from phalanx.training.buckets import Bucket, LooseBucket, plan
from phalanx.training.fragments import Fragment, count_weights, cut_weights
from phalanx.training.precision import Precision

# Sums that may be under way at once: one travels while the next bucket is filled. What has come is let go at once.
IN_FLIGHT = 2


class FlatShards:
    """The `GradientShards` of stages 0, 1 and 2.

    `parameters`: those to train, by name. They are broadcast from the first DP rank, cast to the dtype of `precision`
    and moved into buckets of at most `bucket_size` elements.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        stage: int,
        mesh: Mesh,
        registry: LayoutRegistry,
        precision: Precision,
        bucket_size: int,
    ) -> None:
        self._parameters = parameters = dict(parameters)
        self.sharded = stage > 0 and mesh.dp.size > 1
        self.scale = 1 / mesh.dp.size
        self._every_pass = stage == 2
        partial = {name for name in parameters if registry[name].partial}
        self._buckets = [
            (LooseBucket if mesh.dp.size == 1 and slots[0].name not in partial else Bucket)(
                slots,
                parameters,
                mesh,
                sharded=self.sharded,
                partial=slots[0].name in partial,
                master_dtype=precision.master_dtype(parameters[slots[0].name].dtype),
                param_dtype=precision.param_dtype(parameters[slots[0].name].dtype),
                gradient_dtype=precision.gradient_dtype(parameters[slots[0].name].dtype, held=not self._every_pass),
            )
            for slots in plan(parameters, partial, bucket_size)
        ]
        self.fragments = [f for bucket in self._buckets for f in _fragments(bucket, registry)]
        self._views = _gradient_views(self._buckets)
        self._inside = False
        self._reducing = False
        self._unreduced = False
        self._launched = 0
        self._fired = [[0] * len(bucket.slots) for bucket in self._buckets]
        # How often a parameter's gradient arrives in one pass; the first pass teaches it (see `_arrived`).
        self._expected: list[list[int]] | None = None
        self._missing: list[int] = []
        self._handles = [
            parameters[slot.name].register_post_accumulate_grad_hook(self._hook(number, index))
            for number, bucket in enumerate(self._buckets)
            for index, slot in enumerate(bucket.slots)
        ]

    def begin(self, *, reduce: bool) -> None:
        self._collect(len(self._buckets))
        self._inside = True
        self._reducing = reduce or self._every_pass
        self._launched = 0
        self._fired = [[0] * len(bucket.slots) for bucket in self._buckets]
        self._missing = [len(bucket.slots) for bucket in self._buckets]

    def end(self) -> None:
        self._inside = False
        if self._reducing:
            self._launch(len(self._buckets))
        self._unreduced = not self._reducing
        expected = self._expected or [[1] * len(bucket.slots) for bucket in self._buckets]
        self._expected = [list(map(max, *pair)) for pair in zip(expected, self._fired, strict=True)]

    def finish(self) -> None:
        if self._unreduced:
            self._collect(len(self._buckets))
            self._launched = 0
            self._launch(len(self._buckets))
            self._unreduced = False
        self._collect(len(self._buckets))
        for bucket in self._buckets:
            bucket.sum_partial()
        for fragment, (bucket, start, stop) in zip(self.fragments, self._views, strict=True):
            gradient = bucket.gradient(start, stop)
            if gradient is None:
                raise RuntimeError("finish() before any backward pass: there is no gradient")
            fragment.tensor.grad = gradient.view(fragment.tensor.shape)

    @torch.no_grad()
    def publish(self) -> None:
        self._check_places()
        for work in [bucket.publish() for bucket in self._buckets]:
            if work is not None:
                work.wait()

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def discard(self) -> None:
        self._inside = self._unreduced = False
        for bucket in self._buckets:
            bucket.discard()
        for fragment in self.fragments:
            fragment.tensor.grad = None

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.discard()
        self._parameters, self._handles, self._buckets, self.fragments, self._views = {}, [], [], [], []

    def _check_places(self) -> None:
        for bucket in self._buckets:
            base, width = bucket.params.data_ptr(), bucket.params.element_size()
            for slot in bucket.slots:
                if self._parameters[slot.name].data_ptr() != base + slot.start * width:
                    raise RuntimeError(
                        f"{slot.name} has left its bucket, so the update cannot reach it: the model was moved or cast "
                        "after the engine was made. Do that before"
                    )

    def _hook(self, number: int, index: int) -> Any:
        def take(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self._arrived(number, index, gradient.to_dense() if gradient.is_sparse else gradient)

        return take

    def _arrived(self, number: int, index: int, gradient: Tensor) -> None:
        name = self._buckets[number].slots[index].name
        if not self._inside:
            raise RuntimeError(
                f"a gradient of {name} arrived outside of engine.backward(): call engine.backward(loss) instead of "
                "loss.backward(), so that it is scaled and summed over the ranks"
            )
        if number < self._launched:
            raise RuntimeError(
                f"{name} got one more gradient in this backward pass than in those before, after its sum over the DP "
                "ranks had begun: with re-entrant checkpointing of a shared parameter use use_reentrant=False"
            )
        self._buckets[number].add(index, gradient)
        self._fired[number][index] += 1
        # Re-entrant checkpointing delivers a shared parameter's gradient in several parts, so "it has come" is not
        # "it is complete": the first pass counts the parts and leaves all sums to its end.
        if self._expected is None or self._fired[number][index] != self._expected[number][index]:
            return
        self._missing[number] -= 1
        if self._reducing:
            full = self._launched
            while full < len(self._buckets) and self._missing[full] == 0:
                full += 1
            self._launch(full)

    def _launch(self, stop: int) -> None:
        for number in range(self._launched, stop):
            self._buckets[number].launch()
            self._launched = number + 1
            self._collect(self._launched - IN_FLIGHT)

    def _collect(self, stop: int) -> None:
        for bucket in self._buckets[: max(stop, 0)]:
            bucket.collect()


def _fragments(bucket: Bucket, registry: LayoutRegistry) -> list[Fragment]:
    """What this rank owns of each slot; in the order of `_gradient_views`."""
    found = []
    for slot in bucket.slots:
        start, stop = max(slot.start, bucket.start), min(slot.stop, bucket.stop)
        if start >= stop:
            continue
        master = bucket.master[start - bucket.start : stop - bucket.start]
        if not bucket.sharded:
            master = master.view(slot.shape)
        start, stop = start - slot.start, stop - slot.start
        count = count_weights(registry, slot.name, slot.shape, master.device)
        found.append(
            Fragment(slot.name, start, stop, nn.Parameter(master), cut_weights(count, start, stop, master.shape))
        )
    return found


def _gradient_views(buckets: list[Bucket]) -> list[tuple[Bucket, int, int]]:
    """For each fragment: its bucket, and where its gradient lies in what the bucket has reduced."""
    return [
        (bucket, max(slot.start, bucket.start) - bucket.start, min(slot.stop, bucket.stop) - bucket.start)
        for bucket in buckets
        for slot in bucket.slots
        if max(slot.start, bucket.start) < min(slot.stop, bucket.stop)
    ]
