"""The parts of a model that are worth compiling each by itself.

Blocks that repeat share what is compiled for the first of them. What a model does before and after them is left as it
is: a causal mask that it would only make to be traced stays a flag, which attention is several times faster with, and
the loss keeps its own kernels. The backward pass too comes block by block, so that sums of gradients travel during it.
"""

from __future__ import annotations

from torch import nn


def blocks(module: nn.Module) -> list[nn.Module]:
    """The entries of the outermost `nn.ModuleList`s; the module itself where there is none."""
    return entries(module) or [module]


def entries(module: nn.Module) -> list[nn.Module]:
    """The entries of the outermost `nn.ModuleList`s in `module`, each once; of lists of lists, those of the inner ones,
    since a list has no forward."""
    found = [each for child in module.children() for each in _within(child)]
    return list(dict.fromkeys(found))


def _within(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList):
        return entries(module)
    return [each for entry in module for each in (_within(entry) if isinstance(entry, nn.ModuleList) else [entry])]
