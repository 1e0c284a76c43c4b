"""Models with experts: checkpoints in every spelling, faulty ones, configs, back ends, what a rank reads.

That every variant equals transformers is shown with the other families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralForCausalLM

from phalanx.distributed.group import Group, SoloGroup
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from phalanx.models import POLICIES, DeclarationError, TransformerModel
from phalanx.models.experts import Experts, ExpertsParameter
from phalanx.models.llama import LlamaAttention
from phalanx.models.mixtral import MixtralPolicy
from phalanx.models.moe import MoETransformerModel
from phalanx.models.parameters import MoEGateParameter, MoEMLP1Parameter, MoEMLP2Parameter
from phalanx.models.traits import integer_of
from phalanx.ops import registry
from phalanx.ops.moe import MaskedExperts
from phalanx.weights import WeightError
from tests.models.families import LENGTH, config_of, folder_of, module_of
from tests.models.kit import RecordingSource, bare_model
from tests.models.tiny import error, randomize, reference

IDS = torch.randint(3, 131, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
CASES = ("mixtral:window", "qwen2_moe:some-dense", "qwen3_moe:sparse-steps")


def logits(source: Any, group: Group | None = None, **settings: Any) -> Tensor:
    group = group or SoloGroup()
    settings = {"num_blocks": 60, "block_size": 8, "tensor_parallel_size": group.size, **settings}
    return build_engine(source, group=group, device="cpu", **settings).put([0], [IDS], logits="all")


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    """transformers' module, the folder that it was saved in, its case."""
    return *folder_of(request.param, tmp_path_factory.mktemp("moe") / "model"), request.param


# -- checkpoints


def test_a_tensor_for_each_expert_or_one_for_all(made: tuple[Any, Path, str]) -> None:
    module, folder, case = made
    stored, fused = load_file(folder / "model.safetensors"), module.state_dict()
    assert any(".experts.1." in name for name in stored) and any(name.endswith("experts.down_proj") for name in fused)
    expected = reference(module, IDS, [LENGTH])
    config = json.loads((folder / "config.json").read_text())
    # Names as both spellings have them, each in one layer only.
    last = f"layers.{config['num_hidden_layers'] - 1}."
    mixed = {name: tensor for name, tensor in stored.items() if last not in name}
    mixed.update({name: tensor for name, tensor in fused.items() if last in name})
    for source in (stored, fused, mixed):
        for world in (1, 2):
            for found in run_threads(world, lambda group, source=source: logits(source, group, hf_config=config)):
                assert error(found, expected) < 1e-4, case


@pytest.mark.parametrize("world", [1, 2])
def test_a_serialised_model_is_the_same(made: tuple[Any, Path, str], world: int, tmp_path: Path) -> None:
    settings = {"num_blocks": 60, "block_size": 8, "tensor_parallel_size": world}

    def write(group: Group) -> Tensor:
        engine = build_engine(made[1], group=group, device="cpu", **settings)
        engine.serialize(tmp_path / "served")
        return engine.put([0], [IDS], logits="all")

    before = run_threads(world, write)
    after = run_threads(world, lambda group: logits(tmp_path / "served", group))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    if world == 1:
        with pytest.raises(WeightError, match="linear: this engine is told to use 'plain'"):
            logits(tmp_path / "served", ops={"linear": "plain"})


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_reads_its_part_of_every_expert_only(fused: bool, tmp_path: Path) -> None:
    module, folder = folder_of("mixtral:window", tmp_path)
    tensors = module.state_dict() if fused else load_file(folder / "model.safetensors")
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    sources = [RecordingSource(tensors) for _ in range(4)]
    run_threads(4, lambda group: logits(sources[group.rank], group, hf_config=module.config.to_dict()))
    for source, share in zip(sources, (7, 7, 6, 6), strict=True):
        source.reads = [read for read in source.reads if read[0] in experts]
        assert source.elements_read() * 26 == share * sum(tensor.numel() for tensor in experts.values())


Tensors = dict[str, Tensor]
MIXTRAL, QWEN = "model.layers.1.block_sparse_moe", "model.layers.0.mlp"


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def renamed(name: str, other: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def put(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


FAULTS: list[tuple[str, bool, Callable[[Tensors], object], list[str]]] = [
    ("mixtral:window", False, without(f"{MIXTRAL}.experts.3.w3.weight"), [f"missing: {MIXTRAL}.experts.3.w3.weight"]),
    ("mixtral:window", False, without(f"{MIXTRAL}.gate.weight"), [f"missing: {MIXTRAL}.gate.weight"]),
    (
        "mixtral:window",
        False,
        put(f"{MIXTRAL}.experts.5.w2.weight", 48, 26),
        [f"unknown tensor '{MIXTRAL}.experts.5.w2.weight': .* but the model has 5 of them"],
    ),
    (
        "mixtral:window",
        False,
        put(f"{MIXTRAL}.experts.2.w2.weight", 26, 48),
        [rf"wrong shape: {MIXTRAL}.experts.2.w2.weight is \(26, 48\), the config asks for \(48, 26\)"],
    ),
    (
        "mixtral:window",
        False,
        renamed(f"{MIXTRAL}.experts.0.w1.weight", f"{MIXTRAL}.experts.0.w4.weight"),
        [
            f"missing: {MIXTRAL}.experts.0.w1.weight",
            f"unknown tensor '{MIXTRAL}.experts.0.w4.weight': .*nearest: .*experts.*weight",
        ],
    ),
    (
        "mixtral:window",
        False,
        put(f"{MIXTRAL}.experts.02.w1.weight", 26, 48),
        [r"fed twice: .*experts\.02\.w1"],
    ),
    (
        "qwen3_moe:plain",
        True,
        put(f"{QWEN}.experts.down_proj", 6, 22, 48),
        [rf"wrong shape: {QWEN}.experts.down_proj is \(6, 22, 48\), the config asks for \(6, 48, 22\)"],
    ),
    (
        "qwen3_moe:plain",
        True,
        put(f"{QWEN}.experts.gate_up_proj", 7, 44, 48),
        [rf"wrong shape: {QWEN}.experts.gate_up_proj is \(7, 44, 48\), the config asks for \(6, 44, 48\)"],
    ),
    (
        "qwen3_moe:plain",
        True,
        renamed(f"{QWEN}.experts.down_proj", f"{QWEN}.experts.down_projs"),
        [f"missing: {QWEN}.experts.down_proj", "unknown tensor .*down_projs': .*nearest: mlp.experts.down_proj"],
    ),
    (
        "qwen3_moe:plain",
        True,
        put(f"{QWEN}.experts.0.up_proj.weight", 22, 48),
        [f"unknown tensor '{QWEN}.experts.0.up_proj.weight'"],
    ),
    (
        "qwen2_moe:some-dense",
        False,
        without(f"{QWEN}.shared_expert.up_proj.weight"),
        [f"missing: {QWEN}.shared_expert.up_proj.weight"],
    ),
    (
        "qwen2_moe:some-dense",
        False,
        put(f"{QWEN}.shared_expert_gate.weight", 48, 1),
        [r"wrong shape: .*shared_expert_gate.weight is \(48, 1\), the config asks for \(1, 48\)"],
    ),
    (
        "qwen2_moe:some-dense",
        False,
        put("model.layers.1.mlp.gate.weight", 6, 48),
        ["unknown tensor 'model.layers.1.mlp.gate.weight': LlamaLayer has no rule for it; nearest: mlp.gate_proj"],
    ),
]


@pytest.mark.parametrize(("case", "fused", "spoil", "problems"), FAULTS)
def test_faulty_checkpoints(
    case: str, fused: bool, spoil: Callable[[Tensors], object], problems: list[str], tmp_path: Path
) -> None:
    module, folder = folder_of(case, tmp_path)
    tensors = dict(module.state_dict()) if fused else load_file(folder / "model.safetensors")
    spoil(tensors)
    with pytest.raises(WeightError) as caught:
        logits(tensors, hf_config=module.config.to_dict())
    found = sorted(caught.value.problems)
    assert len(found) == len(problems), found
    for problem, pattern in zip(found, sorted(problems), strict=True):
        assert re.match(pattern, problem), problem


def test_a_file_that_cannot_be_listed(tmp_path: Path) -> None:
    _, folder = folder_of("mixtral:window", tmp_path)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(WeightError) as caught:
        logits(folder)
    assert len(caught.value.problems) == 1 and "is truncated or corrupt" in caught.value.problems[0]


def test_the_reverse_of_a_dense_layer_is_found(tmp_path: Path) -> None:
    module, folder = folder_of("qwen3_moe:sparse-steps", tmp_path)
    config = {**module.config.to_dict(), "decoder_sparse_step": 1}
    with pytest.raises(WeightError) as caught:
        logits(folder, hf_config=config)
    assert any("missing: model.layers.0.mlp.experts.5.up_proj.weight" in problem for problem in caught.value.problems)


# -- configs


def old_experts(config: dict[str, Any]) -> None:
    config["num_experts"] = config.pop("num_local_experts")


def old_rope(config: dict[str, Any]) -> None:
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")


def old_layers(config: dict[str, Any]) -> None:
    old_rope(config)
    del config["layer_types"]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3_moe:plain", old_experts),
        ("mixtral:window", old_rope),
        ("qwen2_moe:windows", old_layers),
        ("qwen3_moe:sparse-steps", old_rope),
    ],
)
def test_old_spellings_mean_the_same(case: str, change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    module, folder = folder_of(case, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    assert error(logits(folder), reference(module, IDS, [LENGTH])) < 1e-4


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mixtral:window", {"num_experts_per_tok": 6}, "a token cannot go to 6 of 5 experts"),
        ("mixtral:window", {"num_experts_per_tok": 0}, "a token cannot go to 0 of 5 experts"),
        ("mixtral:window", {"num_local_experts": "many"}, "num_local_experts='many': expected a whole number"),
        ("mixtral:window", {"hidden_act": "swishish"}, "unknown activation 'swishish'"),
        ("qwen3_moe:plain", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected at least 1"),
        ("qwen3_moe:plain", {"moe_intermediate_size": 0}, "experts have a width of 0"),
        ("qwen3_moe:plain", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes': expected true or false"),
        ("qwen3_moe:plain", {"mlp_only_layers": "1"}, "mlp_only_layers='1': expected a list of layers"),
        ("qwen2_moe:narrow", {"shared_expert_intermediate_size": -1}, "a shared one of width -1"),
        ("qwen2_moe:narrow", {"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case: str, changes: dict[str, Any], message: str) -> None:
    config = {**config_of(case).to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        build_engine({}, hf_config=config, num_blocks=8)


# -- batches and back ends


def test_logits_do_not_depend_on_batch_mates(made: tuple[Any, Path, str]) -> None:
    engine = build_engine(made[1], device="cpu", num_blocks=60, block_size=8)
    texts = [IDS[:5], IDS[3:20], IDS[7:8], IDS[20:33]]
    together = engine.put(range(4), texts)
    steps = engine.put(range(4), [[9], [4], [7], [8]])
    for uid, (text, token) in enumerate(zip(texts, (9, 4, 7, 8), strict=True)):
        assert torch.equal(engine.put([uid + 10], [text])[0], together[uid])
        assert torch.equal(engine.put([uid + 10], [[token]])[0], steps[uid])


@pytest.fixture
def masked() -> Iterator[None]:
    """The back end for CUDA, here too."""
    registry.register("moe", "masked-here", MaskedExperts(), priority=-1)
    yield
    registry.unregister("moe", "masked-here")


def test_the_back_end_without_host_reads(made: tuple[Any, Path, str], masked: None) -> None:
    module, folder, _ = made
    expected = reference(module, IDS, [LENGTH])
    for world in (1, 2, 4):
        for found in run_threads(world, lambda group: logits(folder, group, ops={"moe": "masked-here"})):
            assert error(found, expected) < 1e-4


def test_bf16_stays_within_its_rounding(made: tuple[Any, Path, str]) -> None:
    # The router's choice may flip where two experts are nearly equal, for some tokens.
    found, expected = logits(made[1], dtype="bfloat16"), reference(made[0], IDS, [LENGTH])
    each = (found - expected).abs().amax(-1) / expected.abs().amax()
    assert 1e-5 < float(each.median()) < 0.05


def test_one_reduction_for_all_experts_of_a_layer(made: tuple[Any, Path, str]) -> None:
    layers = config_of(made[2]).num_hidden_layers

    def run(group: Group) -> int:
        engine, calls = build_engine(made[1], group=group, device="cpu", tensor_parallel_size=2, num_blocks=60), 0
        plain = group.all_reduce

        def counted(*args: Any, **settings: Any) -> Any:
            nonlocal calls
            calls += 1
            return plain(*args, **settings)

        object.__setattr__(group, "all_reduce", counted)
        engine.put([0], [IDS[:3]])
        return calls

    # Attention and MLP of each layer, and the embedding.
    assert set(run_threads(2, run)) == {2 * layers + 1}


# -- hooks and declarations


def test_hooks_of_experts(policies: dict[str, Any]) -> None:
    class DoubledExperts(Experts):
        def __call__(self, *args: Any) -> Tensor:
            return 2 * super().__call__(*args)

    class Doubled(MoETransformerModel):
        normalize_expert_weights = True
        expert_intermediate_size = integer_of("intermediate_size")

        def make_moe_layer(self) -> Experts:
            made = super().make_moe_layer()
            made.__class__ = DoubledExperts
            return made

        def transform_moe_gate_param(self, value: Any) -> Any:
            return super().transform_moe_gate_param(value[:] * 3)

        def transform_moe_mlp_1_param(self, value: Any) -> Any:
            return super().transform_moe_mlp_1_param([(up, gate) for gate, up in value])

        def transform_moe_mlp_2_param(self, value: Any) -> Any:
            return super().transform_moe_mlp_2_param([part[:] * 0.5 for part in value])

    class DoubledPolicy(MixtralPolicy, replace=True):
        model_class = Doubled
        fused_container = None

    assert POLICIES["mixtral"] is DoubledPolicy
    module = module_of("mixtral:one-of-four")
    tensors = module.state_dict()
    listed = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    with torch.no_grad():
        for layer in range(2):
            ours, theirs = f"model.layers.{layer}.block_sparse_moe", module.model.layers[layer].mlp
            listed[f"{ours}.gate.weight"] = theirs.gate.weight / 3
            for expert in range(4):
                gate, up = theirs.experts.gate_up_proj[expert].chunk(2)
                listed[f"{ours}.experts.{expert}.w1.weight"] = up
                listed[f"{ours}.experts.{expert}.w3.weight"] = gate
                listed[f"{ours}.experts.{expert}.w2.weight"] = theirs.experts.down_proj[expert]
    found = logits(listed, hf_config=module.config.to_dict())
    assert error(found, reference(module, IDS, [LENGTH])) < 1e-4


def test_experts_without_gate(policies: dict[str, Any]) -> None:
    class Layer(LlamaAttention):
        moe_gate: MoEGateParameter
        moe_mlp_1: MoEMLP1Parameter
        moe_mlp_2: MoEMLP2Parameter

        PARAM_MAPPING = {
            "mlp.gate.weight": "moe_gate.params",
            "mlp.experts.*.up_proj.weight": "moe_mlp_1.experts",
            "mlp.experts.*.down_proj.weight": "moe_mlp_2.experts",
        }

    class Ungated(MixtralPolicy.model_class):  # type: ignore[misc, name-defined]
        gated_mlp = False
        activation = "relu2"

    class UngatedPolicy(MixtralPolicy, replace=True):
        model_class = Ungated
        moe_container = Layer
        fused_container = None

    # relu(x) * x = relu(x) squared: the same as a gate that equals the up projection.
    module = randomize(MixtralForCausalLM._from_config(config_of("mixtral:window"), experts_implementation="eager"))
    tensors = {name: tensor for name, tensor in module.state_dict().items() if ".experts." not in name}
    with torch.no_grad():
        for layer, block in enumerate(module.model.layers):
            block.mlp.experts.act_fn = torch.nn.ReLU()
            for expert, (first, second) in enumerate(
                zip(block.mlp.experts.gate_up_proj, block.mlp.experts.down_proj, strict=True)
            ):
                first[26:] = first[:26]
                name = f"model.layers.{layer}.mlp.experts.{expert}"
                tensors.update({f"{name}.up_proj.weight": first[:26], f"{name}.down_proj.weight": second})
    expected = reference(module, IDS, [LENGTH])
    for world in (1, 2):
        for found in run_threads(world, lambda group: logits(tensors, group, hf_config=module.config.to_dict())):
            assert error(found, expected) < 1e-4


def test_containers_that_do_not_fit_their_layer() -> None:
    model = bare_model(config_of("mixtral:window").to_dict(), kind=MixtralPolicy.model_class)
    with pytest.raises(DeclarationError, match="layer 0 has experts, its container LlamaLayer says otherwise"):
        model.set_parameters([MixtralPolicy.layer_container(model)] * 2, None)


def test_a_dense_model_class_in_a_policy_for_experts(policies: dict[str, Any]) -> None:
    class Dense(MixtralPolicy, replace=True):
        model_class = TransformerModel

    with pytest.raises(DeclarationError, match="Dense takes a MoETransformerModel, given TransformerModel"):
        logits(module_of("mixtral:window"))


def test_shapes_of_served_experts(tmp_path: Path) -> None:
    _, folder = folder_of("qwen2_moe:narrow", tmp_path)

    def shapes(group: Group) -> list[tuple[int, ...]]:
        layer = build_engine(folder, group=group, tensor_parallel_size=4, num_blocks=8).model.layers[0]
        assert isinstance(layer.moe_mlp_1, ExpertsParameter)
        return [layer.moe_mlp_1.shape, layer.moe_mlp_2.shape, layer.shared_mlp_2.shape]

    wide = [(6, 2, 48), (6, 48, 1)]
    assert run_threads(4, shapes) == [
        [*wide, (48, 2)],
        [*wide, (48, 1)],
        [*wide, (48, 1)],
        [(6, 0, 48), (6, 48, 0), (48, 1)],
    ]
