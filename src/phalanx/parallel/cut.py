"""Carries decisions out on a model: parameters become shards, layers cut layers, and borders stand between them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group
from phalanx.layout import Partition, shard
from phalanx.layout.decide import Decision
from phalanx.layout.roles import adapter_factor
from phalanx.parallel.adapters import adapted_decision, adapted_path, beneath, dropouts_on_parts, drops
from phalanx.parallel.attention import RegionRandom, has_dropout, is_latent_kv, keep_own_heads
from phalanx.parallel.borders import CutSequence, ExpertsBorder, WholeSequence
from phalanx.parallel.inventory import attention_path, attention_shape, text_config, tied_names
from phalanx.parallel.layers import (
    ColumnLinear,
    Cut,
    CutLayer,
    Entry,
    RowLinear,
    VocabEmbedding,
    become,
    copied_runs,
    cut_sizes,
    is_conv1d,
    linear_sizes,
)
from phalanx.parallel.regions import copy_in
from phalanx.parallel.registry import LayoutRegistry, ParameterLayout

_EXPERT_WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim", "ffn_dim", "ffn_hidden_size")


class Cutter:
    """Cuts one model over one group; `cut` is the whole recipe."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        decisions: Mapping[str, Decision],
        *,
        sequence_parallel: bool = False,
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.group = group
        self.decisions = decisions
        self._layouts: dict[str, ParameterLayout] = {}
        self._linears: dict[str, Decision] = {}
        self._experts: dict[str, nn.Module] = {}
        self._tied = tied_names(model)
        self._layers = _decoder_layers(model) if sequence_parallel else []
        if sequence_parallel and not self._layers:
            raise ValueError(
                "sequence parallelism needs a list of decoder layers that hold attention blocks, and this model has "
                "none: switch it off"
            )
        blocks = [block for _, block in attention_blocks(model, decisions)]
        dropout = any(has_dropout(block) for block in blocks) or any(_drops(layer) for layer in self._layers)
        if sequence_parallel and drops(model):
            raise ValueError("sequence parallelism with a lora_dropout is not supported: set it to 0, or leave one out")
        self._random = RegionRandom(group.rank) if dropout or drops(model) else None
        self._whole = WholeSequence(group, overlap)
        self.border: WholeSequence | CutSequence = (
            CutSequence(group, self._random, overlap) if sequence_parallel else self._whole
        )

    def cut(self) -> LayoutRegistry:
        self._note_untouched()
        for name, decision in self.decisions.items():
            if decision.style == "experts":
                self._cut_experts(name, decision)
            elif decision.style != "skip":
                self._cut_module(name, decision)
        for module in self._experts.values():
            border = ExpertsBorder(self._layer_border(module))
            module.register_forward_pre_hook(border.before, with_kwargs=True)
            module.register_forward_hook(border.after)
        self._borders_of_linears()
        self._attention_blocks()
        for dropout in dropouts_on_parts(self.model):
            self._draws_by_itself(dropout)
        if isinstance(self.border, CutSequence):
            self._layers[0].register_forward_pre_hook(self.border.before_layers, with_kwargs=True)
            self._layers[-1].register_forward_hook(self.border.after_layers)
        return LayoutRegistry(self._layouts, self.group.rank, self.group.size)

    def _note_untouched(self) -> None:
        for name, parameter in self.model.named_parameters():
            path = name.rpartition(".")[0]
            decision = self.decisions.get(name) or self.decisions.get(f"{path}.weight")
            reason = "no rule names it" if decision is None else decision.source
            partial = decision is not None and decision.sum_gradient
            self._layouts[name] = ParameterLayout(
                name, tuple(parameter.shape), Partition.replicate(), partial or self._acts_on_cut_tokens(name), reason
            )

    def _acts_on_cut_tokens(self, name: str) -> bool:
        """Whether a parameter that is not cut sees only this rank's tokens."""
        if not isinstance(self.border, CutSequence):
            return False
        path, _, leaf = name.rpartition(".")
        if not any(module is layer for layer in self._layers for module in _ancestors(self.model, path)):
            return False
        # An attention block sees all tokens; only the bias of its way out is added after they have been cut again.
        decision = self.decisions.get(f"{path}.weight")
        after = leaf == "bias" and decision is not None and decision.style == "row"
        adapted = adapted_decision(name, self.decisions)
        if adapted is not None and adapter_factor(name) == "B":
            after = adapted.style == "row"
        return after or attention_path(path) is None

    def _shard(self, name: str, partition: Partition, decision: Decision) -> tuple[int, ...]:
        """Make the parameter called `name` this rank's part of itself; returns its whole shape."""
        parameter = self.model.get_parameter(name)
        name = self._tied.get(name, name)
        known = self._layouts[name]
        if known.partition == partition:
            return known.shape
        if parameter.grad is not None:
            raise ValueError(f"{name} has a gradient already: cut the model before its first backward")
        parameter.data = shard(parameter.data, partition, self.group.rank, self.group.size)
        self._layouts[name] = ParameterLayout(name, known.shape, partition, reason=decision.source)
        return known.shape

    def _cut_module(self, name: str, decision: Decision) -> None:
        path = name.rpartition(".")[0]
        module: Any = self.model.get_submodule(path)
        if isinstance(module, CutLayer):
            return  # one module under two names
        _warn_of_changes(path, module)
        shape = self._shard(name, decision.weight, decision)
        rank, world = self.group.rank, self.group.size
        transposed = is_conv1d(module)
        cut = Cut(self.group, decision.weight, transposed, cut_sizes(decision.weight, shape, world))
        cut.gather, cut.split = decision.gather_output, decision.split_input
        cut.vocab = _vocab_range(cut.sizes, rank)
        if isinstance(module, nn.Embedding):
            self._cut_embedding(module, path, cut)
            return
        cut.weight_copies = copied_runs(decision.weight, shape, rank, world)
        # A tied head is decided under the embedding's name, which knows of no bias.
        bias_cut = decision.bias or (decision.weight if decision.style == "vocab" else None)
        if getattr(module, "bias", None) is not None and bias_cut is not None and bias_cut.kind != "replicate":
            bias_shape = self._shard(f"{path}.bias", bias_cut, decision)
            cut.bias_copies = copied_runs(bias_cut, bias_shape, rank, world)
        linear_sizes(module, module.weight.shape, transposed)
        become(module, RowLinear if decision.style == "row" else ColumnLinear, cut)
        self._linears[path] = decision

    def _cut_embedding(self, module: nn.Embedding, path: str, cut: Cut) -> None:
        if module.sparse or module.max_norm is not None:
            raise ValueError(
                f"the embedding {path} is sparse or has a max_norm, which a cut vocabulary does not support"
            )
        first = cut.vocab.start
        padding = module.padding_idx
        module.padding_idx = padding - first if padding is not None and padding in cut.vocab else None
        module.num_embeddings = len(cut.vocab)
        cut.leave = WholeSequence(self.group).leave
        become(module, VocabEmbedding, cut)

    def _cut_experts(self, name: str, decision: Decision) -> None:
        path = name.rpartition(".")[0]
        whole = self._shard(name, decision.weight, decision)
        dim = decision.weight.dim % len(whole)
        # Where the experts' rows follow each other in two dimensions, the parent takes them apart and gets the tokens.
        held = [path] if len(whole) == 3 else [path, path.rpartition(".")[0]]
        if decision.weight.kind == "row":
            own = self.model.get_parameter(name).shape[dim]
            experts = 1 if len(whole) == 3 else decision.weight.view[0]
            for module in map(self.model.get_submodule, held):
                for attribute in _EXPERT_WIDTHS:
                    if getattr(module, attribute, None) == whole[dim] // experts:
                        setattr(module, attribute, own // experts)
        self._experts[held[-1]] = self.model.get_submodule(held[-1])

    def _layer_border(self, module: nn.Module) -> WholeSequence | CutSequence:
        """The border of what stands inside the layers; outside of them all tokens are there."""
        inside = any(module is each for layer in self._layers for each in layer.modules())
        return self.border if inside else self._whole

    def _borders_of_linears(self) -> None:
        entries: dict[tuple[str, bool], Entry] = {}
        for path, decision in self._linears.items():
            module: Any = self.model.get_submodule(path)
            border = self._layer_border(module)
            if decision.style == "row":
                module.cut.leave = border.leave
                continue
            parent = adapted_path(path).rpartition(".")[0]
            if isinstance(border, CutSequence) and (block := self._attention_of(path)) is not None:
                if self._reads_only_parts(block):
                    continue  # the block's own hook joins the tokens
                border = self._whole
            entry = entries.setdefault((parent, isinstance(border, CutSequence)), Entry(border.enter))
            entry.readers += 1
            module.cut.entry = entry

    def _attention_of(self, path: str) -> str | None:
        return attention_path(path.rpartition(".")[0])

    def _reads_only_parts(self, block: str) -> bool:
        """Whether everything with parameters in an attention block is cut, or a norm over heads."""
        return all(
            self._takes_part(f"{block}.{name}".rpartition(".")[0]) or self._layouts[f"{block}.{name}"].partial
            for name, _ in self.model.get_submodule(block).named_parameters()
        )

    def _takes_part(self, path: str) -> bool:
        decision = self._linears.get(path)
        return decision is not None and not decision.gather_output and not decision.split_input

    def _attention_blocks(self) -> None:
        config = text_config(self.model)
        shape = None if config is None else attention_shape(config)
        for path, block in attention_blocks(self.model, self.decisions):
            if shape is None:
                raise ValueError(
                    f"{path} was cut by heads, but {type(self.model).__name__} has no transformers config that says "
                    "how many it has: pass the transformers model itself, or give the wrapper its config as `config`"
                )
            keep_own_heads(block, shape, self.group.rank, self.group.size)
            self._shared_keys(path, block)
            self._own_randomness(path, block)
        if isinstance(self.border, CutSequence):
            self._join_tokens(self.border)

    def _join_tokens(self, border: CutSequence) -> None:
        """Every attention block of the layers gets all tokens, and its way out is a cut linear that cuts them again."""
        outermost = {
            path: module
            for path, module in self.model.named_modules()
            if attention_path(path) == path and attention_path(path.rpartition(".")[0]) is None
        }
        for path, block in outermost.items():
            if not any(block is each for layer in self._layers for each in layer.modules()):
                continue
            if not any(isinstance(child, RowLinear) for child in block.modules()):
                raise ValueError(
                    f"sequence parallelism needs every attention block cut, and {path} has no row layer: cut it, or "
                    "switch sequence parallelism off"
                )
            hook = border.before_attention if self._reads_only_parts(path) else border.before_mixed_attention
            block.register_forward_pre_hook(hook, with_kwargs=True)

    def _shared_keys(self, path: str, block: nn.Module) -> None:
        """Of a latent KV projection (MLA) all heads read the latent part through a cut linear, but the rotated part of
        the keys as it is: that part enters the region here."""
        for name, child in block.named_children():
            if is_latent_kv(f"{path}.{name}"):
                width = int(text_config(self.model).qk_rope_head_dim)

                def enter(module: nn.Module, args: tuple[Any, ...], output: Tensor, width: int = width) -> Tensor:
                    latent, rotated = output.split([output.shape[-1] - width, width], -1)
                    return torch.cat([latent, copy_in(rotated, self.group)], -1)

                child.register_forward_hook(enter)

    def _draws_by_itself(self, dropout: nn.Module) -> None:
        random = self._random
        if random is None:
            return

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module.training:
                random.enter(args[0].device)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if module.training:
                random.leave(output.device)

        dropout.register_forward_pre_hook(enter)
        dropout.register_forward_hook(leave)

    def _own_randomness(self, path: str, block: nn.Module) -> None:
        if self._random is None or isinstance(self.border, CutSequence) or not has_dropout(block):
            return
        names = [name for name, child in block.named_children() if isinstance(beneath(child), ColumnLinear)]
        rows = [beneath(child) for child in block.children() if isinstance(beneath(child), RowLinear)]
        if not names or not rows:
            return
        random = self._random
        # Adapters drop out parts of the block's input, which is the same on all ranks: not before the last of them.
        first: nn.Module = block.get_submodule(names[-1] if drops(block) else names[0])

        def enter(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if block.training:
                random.enter(output.device)

        def leave(module: nn.Module, args: tuple[Any, ...]) -> None:
            if block.training:
                random.leave(args[0].device)

        first.register_forward_hook(enter)
        for row in rows:
            row.register_forward_pre_hook(leave)


def attention_blocks(model: nn.Module, decisions: Mapping[str, Decision]) -> list[tuple[str, nn.Module]]:
    """The modules that directly hold projections cut by heads, by name."""
    found: dict[str, nn.Module] = {}
    for name, decision in decisions.items():
        parent = adapted_path(name.rpartition(".")[0]).rpartition(".")[0]
        if adapter_factor(name) is not None:
            continue
        if decision.style == "column" and not decision.gather_output and attention_path(parent) is not None:
            found[parent] = model.get_submodule(parent)
    return list(found.items())


def check_same_weights(model: nn.Module, group: Group, device: torch.device) -> None:
    """Raise ValueError on every rank, naming parameters, if the ranks of a group hold different models.

    Compares two sums of every parameter, which cost one pass over the weights. `device`: where the group's tensors are.
    """
    shapes = "; ".join(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters())
    digest = int.from_bytes(blake2b(shapes.encode(), digest_size=8).digest(), "little", signed=True)
    digests = group.all_gather(torch.tensor([digest], device=device)).tolist()
    if len(set(digests)) > 1:
        other = [rank for rank, each in enumerate(digests) if each != digests[0]]
        raise ValueError(
            "the ranks of a tensor-parallel group hold different models: the names, shapes, dtypes or requires_grad of "
            f"the parameters of ranks {other} are not those of rank 0. Build the same model on all of them"
        )
    names, sums = [], []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return
        wide = parameter.detach().to(torch.float64)
        names.append(name)
        sums.append(torch.stack([wide.sum(), wide.square().sum()]).to(device))
    if not sums:
        return
    mine = torch.stack(sums)[None]
    everyones = group.all_gather(mine)
    same = (everyones == everyones[:1]) | (everyones.isnan() & everyones[:1].isnan())
    if bool(same.all()):
        return
    different = [name for name, equal in zip(names, same.all(-1).all(0).tolist(), strict=True) if not equal]
    ranks = [rank for rank, equal in enumerate(same.all(-1).all(-1).tolist()) if not equal]
    raise ValueError(
        f"the ranks of a tensor-parallel group hold different models: ranks {ranks} differ from rank 0 in "
        f"{len(different)} of {len(names)} parameters, {', '.join(different[:3])} among them. Load the same checkpoint "
        "on all of them, or set the same seed before the model is built"
    )


def _warn_of_changes(path: str, module: nn.Module) -> None:
    # Those on embeddings are for gradients to flow (activation checkpointing), and see whole rows.
    hooked = bool(module._forward_hooks or module._forward_pre_hooks) and not isinstance(module, nn.Embedding)
    if hooked or "forward" in vars(module):
        warnings.warn(
            f"{path} has {'forward hooks' if hooked else 'a forward of its own'}: on each rank it sees a part of the "
            "features only. What looks across features computes another function now",
            stacklevel=2,
        )


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            paths = [name for layer in module for name, _ in layer.named_modules()]
            if any(attention_path(path) is not None for path in paths):
                return list(module)
    return []


def _drops(layer: nn.Module) -> bool:
    return has_dropout(layer) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules())


def _ancestors(model: nn.Module, path: str) -> list[nn.Module]:
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts) + 1)]


def _vocab_range(sizes: Sequence[int], rank: int) -> range:
    first = sum(sizes[:rank])
    return range(first, first + sizes[rank])
