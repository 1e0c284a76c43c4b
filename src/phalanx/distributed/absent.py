"""A rank without the others, for whoever wants to know what it would hold."""

from __future__ import annotations

from typing import Any

from phalanx.distributed.group import Group


class AbsentRank(Group):
    """A place in a group whose ranks do not exist: enough to build a model for, and nothing can be exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def _refuse(self, *given: Any, **named: Any) -> Any:
        raise RuntimeError("the ranks of this group do not exist: models are built for it, not run")

    all_reduce = all_gather = broadcast = broadcast_bytes = barrier = check = _refuse

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
