"""How large the KV pool may be: measured, after a forward and a sampling at their limits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from phalanx.config import ConfigError
from phalanx.distributed.group import Group
from phalanx.engine.decode import decode_sizes
from phalanx.engine.kv_storage import block_bytes
from phalanx.engine.runner import Runner

log = logging.getLogger("phalanx")


def size_pool(runner: Runner, num_tokens: int, num_seqs: int, group: Group) -> int:
    """Blocks of the pool, the dummy block included, equal on every rank.

    Runs a forward of ``num_tokens`` tokens of ``num_seqs`` sequences, logits and sampler included, and gives the pool
    ``memory_fraction`` of what is free beside the most that this took, but no more than the sequences can fill.

    Raises:
        ConfigError: not even a block fits; the figures are named.
    """
    model = runner.model
    config = model.engine_config
    size = block_bytes(model.kv_groups, config.block_size)
    if config.num_blocks is not None:
        blocks = config.num_blocks
    else:
        useful = 1 + num_seqs * -(-runner.max_len // config.block_size) * len(model.kv_groups)
        room = config.kv_cache_memory or measured_room(runner, num_tokens, num_seqs, group)
        blocks = min(useful, room // size) if size else useful
        if blocks < 2:
            raise ConfigError(
                f"a KV block takes {size} bytes and {room} bytes are left for the pool: lower max_num_batched_tokens "
                "or max_num_seqs, or raise kv_cache_memory or memory_fraction"
            )
    mine = torch.tensor([blocks], dtype=torch.int64, device=runner.device)
    least = int(group.all_gather(mine, 0, [1] * group.size).min())
    log.info("KV pool: %d blocks of %d tokens, %.2f GB", least, config.block_size, least * size / 1e9)
    return least


def measured_room(runner: Runner, num_tokens: int, num_seqs: int, group: Group) -> int:
    """Bytes that the pool may take on this rank."""
    runner.allocate_kv(1)
    activations = peak_of(lambda: runner.profile(num_tokens, num_seqs), runner.device)
    if runner.device.type == "cuda" and runner.samplers is not None and runner.model.engine_config.cuda_graphs:
        # Graphs keep their memory, beside what other steps take; all but the logits is one memory for all of them.
        activations += peak_of(lambda: runner.profile_decode(num_seqs), runner.device)
        others = sum(decode_sizes(num_seqs)) - num_seqs
        activations += others * runner.model.vocab_size * torch.float32.itemsize
    room = int(runner.model.engine_config.memory_fraction * (free_bytes(runner.device) - activations))
    # Ranks on one machine share its memory.
    return room // group.size if runner.device.type == "cpu" else room


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Bytes that ``work()`` held at its peak above what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    reset = Path("/proc/self/clear_refs")
    try:
        reset.write_text("5")
    except OSError:
        # Elsewhere than Linux the peak since the start stands in for it, which is larger.
        log.debug("the peak of the resident memory cannot be reset here")
    before = _resident("VmRSS")
    work()
    return max(_resident("VmHWM") - before, 0)


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device now; on the CPU within the container's limit too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return free


def _resident(field: str) -> int:
    for line in _lines("/proc/self/status"):
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
