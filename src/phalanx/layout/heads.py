"""Which rank owns which attention heads.

Everything that has heads (Q, K and V weights, their biases, the KV cache, the output projection) asks here, so that all
of them agree. Three properties hold on every rank:

- its query heads are one contiguous range, and so are its KV heads;
- it holds exactly the KV heads that its query heads read;
- its query heads fall into equal groups, one group a KV head, so attention may treat them as a uniform GQA problem.
"""

from __future__ import annotations


def deal(units: int, rank: int, world: int) -> range:
    """The contiguous share of `units` that `rank` gets; where they do not divide, the first ranks get one more."""
    check_rank(rank, world)
    if units < 0:
        raise ValueError(f"cannot deal {units} units: the count must not be negative")
    size, extra = divmod(units, world)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def query_heads(num_heads: int, num_kv_heads: int, rank: int, world: int) -> range:
    """The query heads of `rank`.

    Up to one rank a KV head, KV heads are dealt whole with the query heads that read them. With more ranks, the ranks
    are dealt over the KV heads, and the query heads of a KV head over its ranks; some ranks may then own no head.
    """
    group = group_size(num_heads, num_kv_heads)
    if world <= num_kv_heads:
        owned = deal(num_kv_heads, rank, world)
        return range(owned.start * group, owned.stop * group)
    head, ranks = _ranks_of_shared_kv_head(num_kv_heads, rank, world)
    share = deal(group, rank - ranks.start, len(ranks))
    return range(head * group + share.start, head * group + share.stop)


def kv_heads(num_heads: int, num_kv_heads: int, rank: int, world: int) -> range:
    """The KV heads that `rank` holds: those that its query heads read, none if it has no query head."""
    group = group_size(num_heads, num_kv_heads)
    if world <= num_kv_heads:
        return deal(num_kv_heads, rank, world)
    head, ranks = _ranks_of_shared_kv_head(num_kv_heads, rank, world)
    return range(head, head + (rank - ranks.start < group))


def kv_copies(num_heads: int, num_kv_heads: int, rank: int, world: int) -> int:
    """How many ranks hold each KV head that `rank` holds (1 or more, 0 for a rank that holds none)."""
    group = group_size(num_heads, num_kv_heads)
    if world <= num_kv_heads:
        check_rank(rank, world)
        return 1
    _, ranks = _ranks_of_shared_kv_head(num_kv_heads, rank, world)
    return min(len(ranks), group) if rank - ranks.start < group else 0


def group_size(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that read one KV head."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads: both counts must be positive and "
            "num_heads a multiple of num_kv_heads"
        )
    return num_heads // num_kv_heads


def check_rank(rank: int, world: int) -> None:
    """Raise ValueError unless 0 <= rank < world."""
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside a world of {world}: it must be in 0..{world - 1}")


def _ranks_of_shared_kv_head(num_kv_heads: int, rank: int, world: int) -> tuple[int, range]:
    """With more ranks than KV heads: the KV head that `rank` serves, and all ranks that serve it."""
    check_rank(rank, world)
    for head in range(num_kv_heads):
        ranks = deal(world, head, num_kv_heads)
        if rank in ranks:
            return head, ranks
    raise ValueError(f"no KV head of {num_kv_heads} is served by rank {rank} of {world}")
