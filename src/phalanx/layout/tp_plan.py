"""Hugging Face `tp_plan`s: {module name with `*` for layer numbers: style} -> what it means for a weight.

The names of the styles are those of transformers 4.5x and 5.x. A style on a module that only says how outputs of its
parts are put together needs nothing here, since every row layer reduces its own output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.layout.roles import parts
from phalanx.layout.rules import near
from phalanx.layout.weight import Weight


@dataclass(frozen=True)
class Style:
    """What one style of a tp_plan means. `transposed`: the tensor is stored [..., in, out]."""

    style: Literal["column", "row", "vocab", "skip"]
    gather_output: bool = False
    split_input: bool = False
    sum_gradient: bool = False
    transposed: bool = False


STYLES: Mapping[str, Style] = {
    **dict.fromkeys(("colwise", "local_colwise", "packed_colwise", "local_packed_colwise"), Style("column")),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), Style("column", gather_output=True)),
    **dict.fromkeys(("rowwise", "local_rowwise"), Style("row")),
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input"), Style("row", split_input=True)),
    **dict.fromkeys(("packed_rowwise", "local_packed_rowwise"), Style("column", transposed=True)),
    "embedding_rowwise": Style("vocab"),
    "replicated_with_grad_allreduce": Style("skip", sum_gradient=True),
    # Inside attention, where every gradient is a part: see `decide`.
    "mla_kv_a_proj": Style("skip"),
    **dict.fromkeys(("replicate", "sequence_parallel"), Style("skip")),
}
# These stand on a module beside the styles of its weights.
MODULE_STYLES = ("moe_tp_experts", "moe_identity_expert", "gather", "all_reduce", "local", "local_params", "isolated")
_EXPERT_PARALLEL = "it is expert parallelism, which is not supported: use a plan that cuts inside of each expert"
REFUSED_STYLES: Mapping[str, str] = {
    "embedding_colwise": "it cuts an embedding's hidden size, which every later layer needs whole",
    **dict.fromkeys(("grouped_gemm", "ep_dispatch_experts", "ep_router"), _EXPERT_PARALLEL),
}


def plan_problems(plan: Mapping[str, str]) -> list[str]:
    """One problem for each style that is not known or not supported."""
    problems = []
    for key, style in plan.items():
        if style in REFUSED_STYLES:
            problems.append(f"tp_plan style {style!r} of {key!r}: {REFUSED_STYLES[style]}")
        elif style not in STYLES and style not in MODULE_STYLES:
            known = [*STYLES, *MODULE_STYLES]
            problems.append(
                f"unknown tp_plan style {style!r} of {key!r}{near(str(style), known)}: use {', '.join(known)}"
            )
    return problems


def planned(plan: Mapping[str, str], weight: Weight) -> tuple[str, Style] | None:
    """The style of the most specific key of the plan that names the weight or its module, and what it means.

    A key names the end of the module's name, so that it holds with and without the prefix of the base model.
    """
    module = ".".join(parts(weight.name))
    found = [key for key, style in plan.items() if style in STYLES and _names(key, module)]
    if not found:
        return None
    style = plan[max(found, key=len)]
    return style, STYLES[style]


def _names(key: str, module: str) -> bool:
    pattern = r"[^.]+".join(map(re.escape, key.removesuffix(".weight").split("*")))
    return re.fullmatch(rf"(?:.*\.)?{pattern}", module) is not None
