"""Rules, presets, tp_plans and structure -> how each weight of a model is cut.

For each weight, in this order: the user's layer specs; the named preset; if the user gave neither, the model's tp_plan,
then what names tell (structure). How a fused projection is laid out comes from the table of its family wherever a rule
only says that it is cut. Then what belongs together is made to agree, and whatever cannot be right is refused, all of
it in one `RuleError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from phalanx.layout.agree import agree
from phalanx.layout.cut import cut
from phalanx.layout.decision import Decision, Rule
from phalanx.layout.fused import REFUSED
from phalanx.layout.presets import preset as preset_named
from phalanx.layout.roles import Skeleton, adapter_factor, container, generic, parts, plain
from phalanx.layout.rules import LayerSpec, PartitionConfig, RuleError
from phalanx.layout.structure import needs_whole_heads, not_understood, structural
from phalanx.layout.tp_plan import plan_problems, planned
from phalanx.layout.weight import Weight


def decide(
    weights: Sequence[Weight],
    *,
    model_type: str | None,
    config: PartitionConfig | None,
    preset: str | None,
    tp_plan: Mapping[str, str] | None,
    tied: Mapping[str, str],
    world: int,
) -> dict[str, Decision]:
    """How each weight of a model is cut over `world` ranks, by its name (and by its other name if it is tied).

    weights     every parameter that could be cut, norms and routers included.
    model_type  the `model_type` of the Hugging Face config.
    config      the user's own rules, as if not given if they have no layer_specs; `preset` the name of a preset.
    tp_plan     the model's Hugging Face plan, used only without the two.
    tied        {further name: name} of parameters that are one.

    With one rank nothing is cut. Raises RuleError with every fault of the rules, and if nothing would be cut.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    model = Skeleton(weights, tied, () if config is None else config.lm_head_patterns)
    if world == 1:
        return {name: cut(weight, Rule("skip", "one rank"), model) for name, weight in model.weights.items()}
    kind = model_type.lower() if model_type is not None else None
    if kind is not None and kind in REFUSED:
        raise RuleError([f"models of type {model_type!r} cannot be cut: {REFUSED[kind]}"])
    if preset is not None or (config is not None and (config.layer_specs or config.strict_mode)):
        rules, problems = _explicit(model, kind, config or PartitionConfig(), preset)
    else:
        rules, problems = _automatic(model, kind, tp_plan or {})
    if config is not None and config.tp_size not in (None, 1, world):
        problems.append(f"partition_config says tp_size {config.tp_size}, but there are {world} ranks: drop it")
    decisions: dict[str, Decision] = {}
    for name, rule in rules.items():
        if adapter_factor(name) is not None and model.roles[name] in ("latent", "other"):
            # What the rule says of the weight holds for the other factor of its adapter.
            rule = Rule("skip", rule.source, hand_written=rule.hand_written)
        try:
            decisions[name] = cut(model.weights[name], rule, model)
        except ValueError as error:
            problems.append(f"{generic(name)} ({rule.source}): {error}")
            decisions[name] = cut(model.weights[name], Rule("skip", rule.source), model)
    if not problems:
        decisions, problems = agree(model, decisions, world)
    if not problems and not any(decision.is_cut for decision in decisions.values()):
        problems.append(
            f"{world} ranks were asked for, but nothing of the model (type {model_type!r}) would be cut: give a "
            "partition_config with layer_specs, or a preset"
        )
    if problems:
        raise RuleError(list(dict.fromkeys(problems)))
    return decisions


def _automatic(model: Skeleton, family: str | None, plan: Mapping[str, str]) -> tuple[dict[str, Rule], list[str]]:
    rules = structural(model, family)
    strange = {generic(path) for path, names in model.containers.items() if not_understood(model, names) is not None}
    for name, weight in model.weights.items():
        found = planned(plan, weight)
        if found is None or generic(container(weight)) in strange:
            continue
        text, style = found
        gather, split = style.gather_output, style.split_input
        if model.roles[name] in ("qkv", "gate_up") and rules[name].style == "column":
            # The plan of a fused projection whose layout we know only works around not knowing it.
            gather = False
        elif model.roles[name] in ("query", "key", "value") and style.style == "column":
            # Not every plan has an eye on optional norms.
            gather = gather or needs_whole_heads(model, model.containers[container(weight)])
        rules[name] = Rule(
            "vocab" if model.roles[name] == "head" and style.style == "column" else style.style,
            f"tp_plan: {text}",
            family,
            gather_output=gather and model.roles[name] != "head",
            split_input=split,
            sum_gradient=style.sum_gradient,
            transposed=style.transposed,
        )
    return rules, plan_problems(plan)


def _explicit(
    model: Skeleton, model_type: str | None, config: PartitionConfig, preset: str | None
) -> tuple[dict[str, Rule], list[str]]:
    problems: list[str] = []
    named = None
    if preset is not None:
        try:
            named = preset_named(preset)
        except RuleError as error:
            problems += error.problems
    family = (named.family if named is not None else None) or model_type
    own = [(f"layer_specs[{index}]", spec) for index, spec in enumerate(config.layer_specs)]
    specs = [(label, spec, True) for label, spec in own if spec.holds_for(model_type)]
    if named is not None and (config.use_default_specs or not own):
        specs += [(f"preset {preset}", spec, False) for spec in named.specs]
    rules = {}
    for name, weight in model.weights.items():
        found = _first_match(specs, weight)
        if found is not None:
            label, spec, own_rule, pattern = found
            rules[name] = Rule(
                spec.partition_type,
                f"{label}: {pattern!r}" if own_rule else label,
                family,
                spec,
                hand_written=own_rule,
                gather_output=spec.gather_output,
                sum_gradient=spec.grad_allreduce,
            )
            continue
        rules[name] = Rule("skip", "no rule", family)
        if config.strict_mode and weight.kind in ("linear", "conv1d", "embedding", "experts"):
            problems.append(
                f"no matching spec for {generic(name)}, which strict_mode asks for: add one ('skip' keeps it)"
            )
    problems += [
        f"{label}: {problem}"
        for label, spec in own
        if spec.holds_for(model_type)
        for problem in _unmatched(spec, model.weights.values())
    ]
    return rules, problems


def _first_match(
    specs: Iterable[tuple[str, LayerSpec, bool]], weight: Weight
) -> tuple[str, LayerSpec, bool, str] | None:
    for label, spec, own in specs:
        pattern = spec.matching(plain(weight.name)) if _may_name(spec, weight) else None
        if pattern is not None:
            return label, spec, own, pattern
    return None


def _may_name(spec: LayerSpec, weight: Weight) -> bool:
    """Only matrices are cut, so that a pattern wide enough to match a norm means the matrices beside it."""
    return spec.partition_type == "skip" or weight.kind not in ("norm", "other")


def _unmatched(spec: LayerSpec, weights: Iterable[Weight]) -> list[str]:
    candidates = [weight for weight in weights if _may_name(spec, weight)]
    names = sorted({generic(plain(weight.name)) for weight in candidates})
    problems = []
    for pattern in spec.patterns:
        single = LayerSpec((pattern,))
        if not any(single.matching(plain(weight.name)) for weight in candidates):
            close = _near_names(pattern, names)
            hint = (
                f"the nearest are {', '.join(close)}"
                if close
                else f"the weights are called {', '.join(names[:8])}{', ...' if names[8:] else ''}"
            )
            problems.append(f"pattern {pattern!r} matches no weight that it could cut; {hint}")
    return problems


def _near_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names nearest to what a regular expression seems to spell."""
    literal = re.sub(r"\.\*\??|\.\+|\(\?:|[\^$()?]", "", pattern).replace(r"\d+", "*").replace("\\", "").strip(".")
    literal = literal.removesuffix(".weight")
    length = literal.count(".") + 1
    ends = {name: ".".join(parts(name)[-length:]) for name in names}
    close = difflib.get_close_matches(literal, sorted(set(ends.values())), n=3, cutoff=0.6)
    return [name for end in close for name in names if ends[name] == end][:3]


__all__ = ["Decision", "decide"]
