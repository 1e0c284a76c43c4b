"""KVManager: gives sequences their blocks, shares full ones by content, and takes them back when nothing names them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from phalanx.engine.block_pool import DUMMY_BLOCK, BlockPool
from phalanx.engine.prefix_cache import Entry, PrefixCache
from phalanx.engine.sequence import Sequence
from phalanx.models.base import TransformerModel


class KVManager:
    """Blocks of all sequences over all KV groups of a model; every block of the pool can serve any group.

    Args:
        model: asked for its KV groups and, through its hooks, for what a sequence needs.
        num_blocks: of the pool, the dummy included.
        prefix_cache: whether full blocks are shared by content.
        regime: rope regime of a length; None where rope does not depend on one.
    """

    def __init__(
        self,
        model: TransformerModel,
        num_blocks: int,
        prefix_cache: bool,
        regime: Callable[[int], int] | None = None,
    ) -> None:
        self.model = model
        self.block_size = model.engine_config.block_size
        self.windows = [group.spec.window for group in model.kv_groups]
        self.windowed = any(window is not None for window in self.windows)
        self.cache = PrefixCache() if prefix_cache else None
        self.pool = BlockPool(num_blocks, self.cache.remove if self.cache is not None else None)
        self.regime = regime
        # What the model's own hooks answer where they are not overridden, without asking them in every step.
        hooks = ("maybe_allocate_kv", "get_kv_requirements", "get_remaining_block_capacity")
        self.plain = all(getattr(type(model), hook) is getattr(TransformerModel, hook) for hook in hooks)
        self.completed_step = -1
        self._leaving: list[tuple[int, list[int]]] = []

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def free_blocks(self) -> int:
        """Blocks that each KV group of a sequence can still get."""
        return self.pool.num_free // self.num_groups

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that the empty pool holds."""
        return (self.pool.num_blocks - 1) // self.num_groups * self.block_size

    def new_blocks(self) -> list[list[int]]:
        """An empty block list a group."""
        return [[] for _ in range(self.num_groups)]

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Blocks for this many more tokens; False, and nothing taken, where they are not free."""
        if self.plain and num_new_tokens <= len(sequence.blocks[0]) * self.block_size - sequence.num_computed:
            return True
        return self.model.maybe_allocate_kv(sequence, num_new_tokens, self)

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """``num_blocks`` more blocks in every group."""
        for blocks in sequence.blocks:
            blocks.extend(self.pool.allocate(num_blocks))

    # -- sharing

    def match(self, sequence: Sequence) -> int:
        """Gives a fresh sequence the cached blocks of its leading tokens; returns how many tokens they hold.

        At least one token is left to compute, so that there are logits; its whole block is computed anew, since a
        shared block is never written.
        """
        if self.cache is None:
            return 0
        limit = (len(sequence.tokens) - 1) // self.block_size
        chains = [self._chain(sequence, group, limit) for group in range(self.num_groups)]
        length = self._common(chains)
        sequence.entries = [[entry for entry in chain[:length] if entry is not None] for chain in chains]
        for group, chain in enumerate(chains):
            first = self._first_needed(group, length)
            for position, entry in enumerate(chain[:length]):
                if position < first or entry is None:
                    sequence.blocks[group].append(DUMMY_BLOCK)
                else:
                    self.pool.retain(entry.block)
                    sequence.blocks[group].append(entry.block)
        sequence.num_computed = sequence.num_committed = length * self.block_size
        return sequence.num_computed

    def share_prompt(self, parent: Sequence, child: Sequence) -> None:
        """Gives a fresh sequence the full blocks of its parent's prompt, which it has in common."""
        # Behind the prompt their tokens differ; one token is left for the child to compute.
        common = min(len(child.tokens) - 1, parent.prompt_len, parent.num_committed)
        length = common // self.block_size
        for group, blocks in enumerate(parent.blocks):
            if DUMMY_BLOCK in blocks[self._first_needed(group, length) : length]:
                return
        for group, blocks in enumerate(parent.blocks):
            for position, block in enumerate(blocks[:length]):
                keep = block != DUMMY_BLOCK and position >= self._first_needed(group, length)
                if keep:
                    self.pool.retain(block)
                child.blocks[group].append(block if keep else DUMMY_BLOCK)
        child.entries = [entries[:length] for entries in parent.entries]
        child.num_computed = child.num_committed = length * self.block_size

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """A step has ended: the KV of the first ``num_tokens`` is there. Full blocks enter the index; those that no
        window reaches any more leave."""
        before = sequence.num_committed // self.block_size
        sequence.num_committed = max(sequence.num_committed, num_tokens)
        full = sequence.num_committed // self.block_size
        if full == before and not self.windowed:
            return
        for group, window in enumerate(self.windows):
            if self.cache is not None:
                self._index(sequence, group, full)
            if window is not None:
                self._leave_window(sequence, group)

    # -- giving back

    def free(self, sequence: Sequence) -> None:
        """Takes the blocks back; at once, or after the last launched step that names them."""
        for group in range(self.num_groups):
            blocks = [block for block in reversed(sequence.blocks[group]) if block != DUMMY_BLOCK]
            self._release(blocks, sequence.last_step)
        sequence.blocks = self.new_blocks()
        sequence.entries = []
        sequence.num_computed = sequence.num_committed = 0

    def step_completed(self, step_id: int) -> None:
        """All steps up to this one have ended."""
        self.completed_step = step_id
        ready = [blocks for step, blocks in self._leaving if step <= step_id]
        self._leaving = [(step, blocks) for step, blocks in self._leaving if step > step_id]
        for blocks in ready:
            self.pool.release(blocks)

    def check(self) -> None:
        """Raises RuntimeError if pool and index disagree."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
            if self.cache.blocks() != self.pool.kept:
                raise RuntimeError("prefix index and block pool disagree about which blocks have known content")

    def _release(self, blocks: list[int], last_step: int) -> None:
        if last_step > self.completed_step:
            self._leaving.append((last_step, blocks))
        else:
            self.pool.release(blocks)

    def _index(self, sequence: Sequence, group: int, full: int) -> None:
        if self.cache is None:
            return
        if not sequence.entries:
            sequence.entries = [[] for _ in range(self.num_groups)]
        entries, size = sequence.entries[group], self.block_size
        for position in range(len(entries), full):
            tokens = sequence.tokens[position * size : (position + 1) * size]
            parent = entries[-1] if entries else None
            block = sequence.blocks[group][position]
            if block == DUMMY_BLOCK:
                return
            entry = self.cache.insert(
                self._root(sequence, group), parent, tokens, block, self._regimes(sequence, position)
            )
            if entry.block == block:
                self.pool.keep(block)
            entries.append(entry)

    def _leave_window(self, sequence: Sequence, group: int) -> None:
        blocks = sequence.blocks[group]
        first = self._first_needed(group, sequence.num_committed // self.block_size, sequence.num_committed)
        gone = []
        for position in range(first - 1, -1, -1):
            if blocks[position] == DUMMY_BLOCK:
                break
            gone.append(blocks[position])
            blocks[position] = DUMMY_BLOCK
        if gone:
            self._release(gone, sequence.last_step)

    def _first_needed(self, group: int, num_blocks: int, num_tokens: int | None = None) -> int:
        """The first block that the next token's query reads, behind ``num_blocks`` full blocks."""
        window = self.windows[group]
        if window is None:
            return 0
        tokens = num_blocks * self.block_size if num_tokens is None else num_tokens
        return max(tokens - window + 1, 0) // self.block_size

    def _chain(self, sequence: Sequence, group: int, limit: int) -> list[Entry | None]:
        chain: list[Entry | None] = []
        if self.cache is None:
            return chain
        root, parent = self._root(sequence, group), None
        for position in range(limit):
            tokens = sequence.tokens[position * self.block_size : (position + 1) * self.block_size]
            entry = self.cache.find(root, parent, tokens, self._regimes(sequence, position))
            if entry is None:
                break
            chain.append(entry)
            parent = entry
        return chain

    @staticmethod
    def _common(chains: Many[Many[Entry | None]]) -> int:
        return min((len(chain) for chain in chains), default=0)

    def _root(self, sequence: Sequence, group: int) -> str:
        return f"{sequence.root}/{group}"

    def _regimes(self, sequence: Sequence, position: int) -> list[int]:
        """Rope regimes of the tokens of a block: a prompt's tokens have the prompt's, others their own length's."""
        if self.regime is None:
            return []
        first = position * self.block_size
        return [self.regime(max(sequence.prompt_len, token + 1)) for token in range(first, first + self.block_size)]
