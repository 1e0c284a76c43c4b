"""Triton kernels that add up the tensors of all ranks over memory that all see, one launch each.

Each program has places of its own in every rank's memory and talks to the same program of the other ranks only. Sums
are in fp32 and in the order of the ranks, so that all ranks get the same bits.

A program that has given up waiting has wrong sums: it sends nothing any more, so that those of the other ranks give up
too, and its own sums are NaN, which no token is drawn from.
"""

# Only the constexpr arguments of a kernel have annotations.
# mypy: disallow_incomplete_defs=False, disallow_untyped_defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _send(
    memories, rank, value, mask, place, which, failed, RANKS: tl.constexpr, PADDED_RANKS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Puts value [ROWS, BLOCK] into a place of every other rank's memory (memories [PADDED_RANKS]), and tells them;
    nothing once this program has failed."""
    inside = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    peer = tl.arange(0, PADDED_RANKS)
    if failed == 0:
        for other in tl.static_range(RANKS):
            if other != rank:
                to = tl.sum(tl.where(peer == other, memories, 0), 0) + place
                tl.store(tl.multiple_of(to.to(tl.pointer_type(value.dtype)), 16) + inside, value, mask=mask)
        # All threads have written before one of them says so; who sees the signal then sees the values.
        tl.debug_barrier()
        signals = memories.to(tl.pointer_type(tl.int32)) + which
        tl.atomic_add(signals, 1, mask=(peer < RANKS) & (peer != rank), sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "patience", "steps"])
def all_reduce_kernel(
    x, residual, weight, out, total, memories, state, size, row, steps, rank, patience, eps,
    RANKS: tl.constexpr, PADDED_RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    PROGRAMS: tl.constexpr, PLACES: tl.constexpr, PLACE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p adds up, in step s, rows `b * ROWS .. (b + 1) * ROWS` of `row` elements each, b = s * programs + p;
    `size` elements in all. With NORM each row is normed after the residual is added.

    A rank puts its values into every other rank's memory, tells them, waits for theirs, and reads its own memory. A
    program has three places there for each rank, used in turn, and sends the next values before it reads the present
    ones: when a place is written again, its owner has read it, since it has sent the signal of the values behind it,
    which was waited for. Therefore one exchange of signals for each place is enough.

    memories: int64 [RANKS], addresses of every rank's memory: signals int32 [PLACES, PROGRAMS], places [PLACES, RANKS,
    PROGRAMS], of which the second index says who writes. state: int32 [1 + 2 * PROGRAMS, 8] of this rank: whether a
    wait was given up; for each program which place is next, how many signals each of the three has had so far, and
    whether it has given up.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, ROWS)[:, None]
    inside = line * BLOCK + column
    peer = tl.arange(0, PADDED_RANKS)
    # What no kernel changes is read before the one ahead has ended.
    home = tl.load(memories + rank)
    peers = tl.load(memories + peer, mask=peer < RANKS, other=0)
    if NORM:
        scale = tl.load(weight + column, mask=column < row, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = state + (1 + program) * 8
    # In one read. What another program says would be seen by some threads and not by others.
    field = tl.arange(0, 8)
    held = tl.load(mine + field)
    turn = tl.sum(tl.where(field == 0, held, 0), 0)
    failed = tl.sum(tl.where(field == 4, held, 0), 0)
    kind: tl.constexpr = x.dtype.element_ty
    element = (program.to(tl.int64) * ROWS + line) * row + column
    mask = (column < row) & (element < size)
    which = turn * PROGRAMS + program
    first = PLACES * PROGRAMS * 4 + program.to(tl.int64) * PLACE_BYTES
    each: tl.constexpr = PROGRAMS * PLACE_BYTES
    value = tl.load(x + element, mask=mask, other=0.0)
    mine_there = first + (turn * RANKS + rank).to(tl.int64) * each
    _send(peers, rank, value, mask, mine_there, which, failed, RANKS, PADDED_RANKS, BLOCK, ROWS)
    for step in tl.range(0, steps):
        wanted = tl.sum(tl.where(field == 1 + turn, held, 0), 0) + (RANKS - 1)
        held = tl.where(field == 1 + turn, wanted, held)
        # What comes next, after the last step nothing, is read while the others are waited for, and what is added.
        next_element = element + tl.num_programs(0).to(tl.int64) * ROWS * row
        next_mask = (column < row) & (next_element < size)
        next_value = tl.load(x + next_element, mask=next_mask, other=0.0)
        if NORM:
            before = tl.load(residual + element, mask=mask, other=0.0).to(tl.float32)
        arrived = home.to(tl.pointer_type(tl.int32)) + which
        left = tl.where(failed == 0, patience, 1)
        # Differences, since the counts wrap around.
        missing = wanted - tl.atomic_add(arrived, 0, sem="acquire", scope="sys")
        while (missing > 0) & (left > 0):
            missing = wanted - tl.atomic_add(arrived, 0, sem="acquire", scope="sys")
            left -= 1
        # More than is waited for cannot come either, unless the ranks have lost each other.
        if missing != 0:
            tl.store(state, 1)
        failed = tl.where(missing != 0, 1, failed)
        tl.debug_barrier()

        # The next values are on their way while these are read.
        present = first + (turn * RANKS).to(tl.int64) * each
        turn = (turn + 1) % PLACES
        which = turn * PROGRAMS + program
        if step + 1 < steps:
            mine_there = first + (turn * RANKS + rank).to(tl.int64) * each
            _send(peers, rank, next_value, next_mask, mine_there, which, failed, RANKS, PADDED_RANKS, BLOCK, ROWS)
        added = tl.zeros((ROWS, BLOCK), tl.float32) + tl.where(failed == 0, 0.0, float("nan"))
        for other in tl.static_range(RANKS):
            theirs = value
            if other != rank:
                # Past L1, which may hold what was here before.
                part = tl.multiple_of((home + present + other * each).to(tl.pointer_type(kind)), 16)
                theirs = tl.load(part + inside, mask=mask, other=0.0, cache_modifier=".cg")
            added += theirs.to(tl.float32)
        result = added.to(kind)
        if NORM:
            result = (result.to(tl.float32) + before).to(kind)
            tl.store(total + element, result, mask=mask)
            wide = result.to(tl.float32)
            result = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / row + eps)[:, None] * scale).to(kind)
        tl.store(out + element, result, mask=mask)
        element, mask, value = next_element, next_mask, next_value
    tl.store(mine + field, tl.where(field == 0, turn, tl.where(field == 4, failed, held)))


@triton.jit
def _halves(words, KIND: tl.constexpr):
    """The lower and the upper 16 bits, numbers of a KIND, as float32."""
    low = words.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _joined(low, high, KIND: tl.constexpr):
    """The other way round."""
    lower = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return lower | (high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["rank", "patience"])
def all_reduce_words_kernel(
    x, residual, weight, out, total, memories, state, size, row, rank, patience, eps,
    RANKS: tl.constexpr, PADDED_RANKS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, NORM: tl.constexpr,
    PROGRAMS: tl.constexpr, FIRST_BYTE: tl.constexpr, PLACE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Like ``all_reduce_kernel``, of numbers of 16 bits, two a word: each word is written to every other rank's memory
    with the number of this call beside it, in one store of 64 bits. Who sees the number has the word: no signal is
    waited for, but twice as much is sent.

    `size` and `row` count elements. memories: from FIRST_BYTE on, places [2, RANKS, PROGRAMS], the second index says
    who writes. They are used in turn: when one is written again, its owner has read it, since it has sent the words of
    the call between, which were waited for. state: behind what is said there, of each program the number of its last
    call, and whether it has given up.
    """
    program = tl.program_id(0)
    kind: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, WORDS)[None, :]
    line = tl.arange(0, ROWS)[:, None]
    inside = line * WORDS + column
    word = (program.to(tl.int64) * ROWS + line) * (row // 2) + column
    mask = (column < row // 2) & (word < size // 2)
    # What no kernel changes is read before the one ahead has ended.
    home = tl.load(memories + rank)
    peer = tl.arange(0, PADDED_RANKS)
    peers = tl.load(memories + peer, mask=peer < RANKS, other=0)
    if NORM:
        scale_low = tl.load(weight + 2 * column, mask=column < row // 2, other=0.0).to(tl.float32)
        scale_high = tl.load(weight + 2 * column + 1, mask=column < row // 2, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = state + (1 + PROGRAMS + program) * 8
    call = tl.load(mine) + 1
    # 0 is what was never written. 2 keeps the turns.
    call = tl.where(call == 0, 2, call)
    failed = tl.load(mine + 1)
    value = tl.load(x.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    if NORM:
        before = tl.load(residual.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    marked = (value.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    places = FIRST_BYTE + ((call & 1) * RANKS * PROGRAMS + program).to(tl.int64) * PLACE_BYTES
    if failed == 0:
        for other in tl.static_range(RANKS):
            if other != rank:
                to = tl.sum(tl.where(peer == other, peers, 0), 0) + places + rank.to(tl.int64) * PROGRAMS * PLACE_BYTES
                tl.store(tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16) + inside, marked, mask=mask)
    left = tl.where(failed == 0, patience, 1)
    low = tl.zeros((ROWS, WORDS), tl.float32)
    high = tl.zeros((ROWS, WORDS), tl.float32)
    for other in tl.static_range(RANKS):
        theirs = value
        if other != rank:
            at = home + places + other * PROGRAMS * PLACE_BYTES
            source = tl.multiple_of(at.to(tl.pointer_type(tl.int64)), 16) + inside
            found = tl.load(source, mask=mask, other=0, volatile=True)
            missing = tl.sum(tl.where(mask & ((found >> 32).to(tl.int32) != call), 1, 0))
            while (missing > 0) & (left > 0):
                found = tl.load(source, mask=mask, other=0, volatile=True)
                missing = tl.sum(tl.where(mask & ((found >> 32).to(tl.int32) != call), 1, 0))
                left -= 1
            if missing > 0:
                tl.store(state, 1)
            failed = tl.where(missing > 0, 1, failed)
            theirs = found.to(tl.int32)
        more_low, more_high = _halves(theirs, kind)
        low += more_low
        high += more_high
    poison = tl.where(failed == 0, 0.0, float("nan"))
    low, high = low + poison, high + poison
    if NORM:
        before_low, before_high = _halves(before, kind)
        low = (low.to(kind).to(tl.float32) + before_low).to(kind).to(tl.float32)
        high = (high.to(kind).to(tl.float32) + before_high).to(kind).to(tl.float32)
        tl.store(total.to(tl.pointer_type(tl.int32)) + word, _joined(low, high, kind), mask=mask)
        factor = tl.rsqrt(tl.sum(low * low + high * high, 1) / row + eps)[:, None]
        low, high = low * factor * scale_low, high * factor * scale_high
    tl.store(out.to(tl.pointer_type(tl.int32)) + word, _joined(low, high, kind), mask=mask)
    tl.store(mine, call)
    tl.store(mine + 1, failed)
