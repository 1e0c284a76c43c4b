"""Executor: runs steps on all ranks. Rank 0 sends, the others follow."""

from __future__ import annotations

from contextlib import suppress

from phalanx.distributed.group import Group
from phalanx.engine.runner import Runner, StepResult
from phalanx.engine.step import Close, Fail, Masks, Message, Return, Serialize, Step, decode, encode
from phalanx.models.serialized import save_parameters


class Executor:
    """Launches steps of one rank's runner, and tells the other ranks of a group to do the same.

    Args:
        runner: this rank's.
        group: the tensor-parallel group.
        leading: the other ranks follow this one's steps. Else each launches the same ones by itself.
        spmd: every rank is told by its user to serialise and to close.
    """

    def __init__(self, runner: Runner, group: Group, leading: bool, spmd: bool) -> None:
        self.runner = runner
        self.group = group
        self.leading = leading and group.size > 1
        self.spmd = spmd

    def launch(self, step: Step) -> StepResult:
        """Starts a step on every rank; the result is still on the device."""
        self.send(step)
        return self.runner.launch(step)

    def sample(self, masks: Masks) -> StepResult:
        """Starts the sampling of the masked step that was launched last, on every rank."""
        self.send(masks)
        return self.runner.sample(masks)

    def serialize(self, order: Serialize) -> None:
        """Writes this rank's parameters and has the ranks that only follow write theirs; returns when all have."""
        if not self.spmd:
            self.send(order)
        self._serialize(order)

    def send(self, message: Message) -> None:
        """From rank 0 to the followers."""
        if self.leading:
            self.group.broadcast_bytes(encode(message))

    def follow(self) -> Return | Close:
        """On the other ranks: does what rank 0 says until a call or the engine ends.

        Raises:
            RemoteError: the call failed on rank 0.
        """
        while True:
            message = decode(self.group.broadcast_bytes())
            if isinstance(message, Step):
                self.runner.launch(message)
            elif isinstance(message, Masks):
                self.runner.sample(message)
            elif isinstance(message, Serialize):
                self._serialize(message)
            elif isinstance(message, Fail):
                raise RemoteError(message.kind, message.message)
            else:
                return message

    def close(self) -> None:
        """Ends the group, and the ranks that only follow."""
        if not self.spmd:
            # A rank that is gone needs no goodbye.
            with suppress(RuntimeError):
                self.send(Close())
        # NCCL ends only once no graph holds its calls.
        self.runner.release()
        self.group.close()

    def _serialize(self, order: Serialize) -> None:
        save_parameters(order.folder, order.policy, self.runner.model)
        self.group.barrier()


class RemoteError(RuntimeError):
    """A call that failed on rank 0, seen on another rank."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind} on rank 0: {message}")
        self.kind = kind
