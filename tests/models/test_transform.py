"""From checkpoint tensors to served ones: every transform cuts first and joins then, and reads nothing but its slices.

What a rank must hold is written down by hand here, for 4 query heads, 2 KV heads of 3, an MLP of 10 and a vocabulary
of 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.models import InferenceParameter, ParameterBase, TransformerModel
from phalanx.models.late_sums import set_late_sums
from phalanx.models.layers import as_prepared
from phalanx.models.parameters import (
    AttentionOutputParameter,
    EmbeddingParameter,
    FusedGatedMLPParameter,
    FusedQKVParameter,
    GatedMLPParameter,
    GQAMegatronQKVParameter,
    InvFreqParameter,
    MegatronQKVParameter,
    MLP1Parameter,
    MLP2Parameter,
    NormParameter,
    PositionEmbeddingParameter,
    UnembedBiasParameter,
    UnembedParameter,
    UnfusedQKVParameter,
)
from phalanx.models.parameters.rows import Rows
from phalanx.ops.linear import restore_weight
from phalanx.weights import WeightError
from tests.models.kit import RecordingSource, bare_model, numbered, stub

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 5, 4, 2, 3, 10, 7
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "partial_rotary_factor": 0.7,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 6,
}

# world -> what each rank holds: query heads, KV heads, MLP rows, vocabulary rows.
RANKS: dict[int, list[tuple[range, range, range, range]]] = {
    1: [(range(4), range(2), range(10), range(7))],
    2: [(range(2), range(1), range(5), range(4)), (range(2, 4), range(1, 2), range(5, 10), range(4, 7))],
    4: [
        (range(1), range(1), range(3), range(2)),
        (range(1, 2), range(1), range(3, 6), range(2, 4)),
        (range(2, 3), range(1, 2), range(6, 8), range(4, 6)),
        (range(3, 4), range(1, 2), range(8, 10), range(6, 7)),
    ],
}
# With as many KV heads as query heads.
MHA_RANKS = {world: [(query, query, *rest) for query, _, *rest in ranks] for world, ranks in RANKS.items()}


def model(rank: int = 0, world: int = 1, **changes: Any) -> TransformerModel:
    place: Any = stub(rank=rank, size=world)
    kind = type("Model", (TransformerModel,), changes.pop("traits", {}))
    return bare_model({**CONFIG, **changes.pop("config", {})}, place, kind, **changes)


def rows(tensor: Tensor, units: Sequence[int], size: int = 1) -> Tensor:
    """The rows of some units of ``size`` rows each."""
    return torch.cat([tensor[unit * size : (unit + 1) * size] for unit in units])


def value_of(parameter: InferenceParameter | None) -> Tensor:
    """The logical tensor of a parameter in any layout."""
    assert parameter is not None
    return parameter.data if parameter.layout == "plain" else restore_weight(as_prepared(parameter))


def finalized(kind: type[ParameterBase], it: TransformerModel, source: RecordingSource) -> Tensor:
    """What a parameter becomes whose dependencies have the names of a source's tensors."""
    parameter = kind(it)
    for name in source.names():
        parameter.set(name, source.tensor(name))
    return value_of(parameter.result)


# Columns: [out, in] where the shape's tail is (HIDDEN,), biases where it is ().
def qkv(kv_heads: int, tail: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    whole = numbered((HEADS + 2 * kv_heads) * HEAD_DIM, *tail)
    q, k, v = whole.split([HEADS * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM])
    return q, k, v


def interleaved(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """[its query heads, k, v] of every KV head, put together one head at a time."""
    group = HEADS // kv_heads
    parts = []
    for head in range(kv_heads):
        parts += [q[i * HEAD_DIM : (i + 1) * HEAD_DIM] for i in range(head * group, (head + 1) * group)]
        parts += [k[head * HEAD_DIM : (head + 1) * HEAD_DIM], v[head * HEAD_DIM : (head + 1) * HEAD_DIM]]
    return torch.cat(parts)


QKV: dict[str, tuple[type[ParameterBase], int, Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]]] = {
    "unfused": (UnfusedQKVParameter, 2, lambda q, k, v: {"q_params": q, "k_params": k, "v_params": v}),
    "fused": (FusedQKVParameter, 2, lambda q, k, v: {"params": torch.cat((q, k, v))}),
    "megatron": (MegatronQKVParameter, 4, lambda q, k, v: {"params": interleaved(q, k, v, 4)}),
    "gqa-megatron": (GQAMegatronQKVParameter, 2, lambda q, k, v: {"params": interleaved(q, k, v, 2)}),
    "gqa-megatron-mha": (GQAMegatronQKVParameter, 4, lambda q, k, v: {"params": interleaved(q, k, v, 4)}),
}


@pytest.mark.parametrize("tail", [(HIDDEN,), ()], ids=["weight", "bias"])
@pytest.mark.parametrize("order", QKV)
def test_qkv_in_every_order(order: str, tail: tuple[int, ...]) -> None:
    kind, kv_heads, stored = QKV[order]
    q, k, v = qkv(kv_heads, tail)
    for world, ranks in (RANKS if kv_heads == 2 else MHA_RANKS).items():
        for rank, (query, kv, _, _) in enumerate(ranks):
            source = RecordingSource(stored(q, k, v))
            found = finalized(kind, model(rank, world, config={"num_key_value_heads": kv_heads}), source)
            expected = torch.cat((rows(q, query, HEAD_DIM), rows(k, kv, HEAD_DIM), rows(v, kv, HEAD_DIM)))
            assert torch.equal(found, expected), (world, rank)
            assert source.elements_read() == expected.numel(), (world, rank)


@pytest.mark.parametrize("tail", [(HIDDEN,), ()], ids=["weight", "bias"])
@pytest.mark.parametrize("kind", [MLP1Parameter, GatedMLPParameter, FusedGatedMLPParameter])
def test_mlp_1(kind: type[ParameterBase], tail: tuple[int, ...]) -> None:
    gate, up = numbered(2 * INNER, *tail).split(INNER)
    stored = {
        MLP1Parameter: {"params": up},
        GatedMLPParameter: {"gate_params": gate, "up_params": up},
        FusedGatedMLPParameter: {"params": torch.cat((gate, up))},
    }
    for world, ranks in RANKS.items():
        for rank, (_, _, inner, _) in enumerate(ranks):
            source = RecordingSource(stored[kind])
            found = finalized(kind, model(rank, world, traits={"gated_mlp": kind is not MLP1Parameter}), source)
            expected = rows(up, inner) if kind is MLP1Parameter else torch.cat((rows(gate, inner), rows(up, inner)))
            assert torch.equal(found, expected) and source.elements_read() == expected.numel(), (world, rank)


@pytest.mark.parametrize("kind", [AttentionOutputParameter, MLP2Parameter])
def test_row_cut_weights_and_their_biases(kind: type[ParameterBase]) -> None:
    attention = kind is AttentionOutputParameter
    weight = numbered(HIDDEN, HEADS * HEAD_DIM if attention else INNER)
    bias = numbered(HIDDEN)
    for world, ranks in RANKS.items():
        for rank, (query, _, inner, _) in enumerate(ranks):
            source = RecordingSource({"params": weight})
            found = finalized(kind, model(rank, world), source)
            expected = rows(weight.T, query, HEAD_DIM).T if attention else rows(weight.T, inner).T
            assert torch.equal(found, expected) and source.elements_read() == expected.numel(), (world, rank)
            # The bias is whole on every rank; that it is added once is shown below.
            assert torch.equal(finalized(kind, model(rank, world), RecordingSource({"params": bias})), bias)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [EmbeddingParameter, UnembedParameter, UnembedBiasParameter])
def test_vocabularies(kind: type[ParameterBase], tied: bool) -> None:
    if tied and kind is UnembedParameter:
        return  # it has none
    table = numbered(VOCAB) if kind is UnembedBiasParameter else numbered(VOCAB, HIDDEN)
    for world, ranks in RANKS.items():
        for rank, (_, _, _, vocab) in enumerate(ranks):
            source = RecordingSource({"params": table})
            found = finalized(kind, model(rank, world, config={"tie_word_embeddings": tied}), source)
            assert torch.equal(found, rows(table, vocab)), (world, rank)
            assert source.elements_read() == found.numel(), (world, rank)


def test_what_is_whole_on_every_rank() -> None:
    for kind, value in (
        (NormParameter, numbered(HIDDEN)),
        (PositionEmbeddingParameter, numbered(6, HIDDEN)),
        (InvFreqParameter, numbered(1)),
    ):
        source = RecordingSource({"params": value})
        assert torch.equal(finalized(kind, model(1, 4), source), value) and source.elements_read() == value.numel()


def test_more_ranks_than_heads_own_nothing() -> None:
    source = RecordingSource({"params": numbered((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)})
    found = finalized(FusedQKVParameter, model(7, 8), source)
    assert found.shape == (0, HIDDEN) and source.reads == []


def test_the_dtype_is_the_models_but_for_inverse_frequencies() -> None:
    it = model(dtype="bfloat16")
    value = numbered(HIDDEN) / 3
    assert finalized(NormParameter, it, RecordingSource({"params": value})).dtype == torch.bfloat16
    found = finalized(InvFreqParameter, it, RecordingSource({"params": value[1:2]}))
    assert torch.equal(found, value[1:2]) and found.dtype == torch.float32


@pytest.mark.parametrize("forced", ["plain", None])
def test_what_is_served_shares_no_memory_with_its_source(forced: str | None) -> None:
    it = model(ops={"linear": forced} if forced else {})
    tensors = {"norm": numbered(HIDDEN), "mlp_2": numbered(HIDDEN, INNER), "embedding": numbered(VOCAB, HIDDEN)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    served = {name: getattr(it, f"transform_{name}_param")(tensor) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(value_of(served[name]), before[name]) for name in tensors)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bias_of_a_row_layer_is_added_once(world: int, late: bool) -> None:
    weight, bias, x = numbered(HIDDEN, INNER), numbered(HIDDEN) + 1, numbered(3, INNER)

    def run(group: Group) -> Tensor:
        it = bare_model(CONFIG, group)
        set_late_sums(it, late)
        mine = RANKS[world][group.rank][2]
        served = it.transform_mlp_2_param(weight)
        assert served is not None
        out = it.mlp_2(x[:, mine.start : mine.stop].contiguous(), served, it.transform_mlp_2_param(bias))
        return group.all_reduce(out) if late else out

    for found in run_threads(world, run):
        assert torch.allclose(found, x @ weight.T + bias)


Q, K, V = qkv(KV_HEADS, (HIDDEN,))
UNFIT: list[tuple[str, Any, str]] = [
    ("qkv", (Q, K), r"given \(12, 5\) \+ \(6, 5\), expected \(12, 5\) \+ \(6, 5\) \+ \(6, 5\)"),
    ("qkv", (Q, K, None), "the checkpoint lacks 1 of 3 parts of a fused weight: give all or none"),
    ("qkv", (K, Q, V), r"given \(6, 5\) \+ \(12, 5\) \+ \(6, 5\), expected \(12, 5\)"),
    ("qkv", Q, r"given \(12, 5\), expected \(24, 5\)"),
    ("qkv", numbered(23), r"given \(23,\), expected \(24,\)"),
    ("attn_out", numbered(HIDDEN, 4), r"given \(5, 4\), expected \(5, 12\)"),
    ("attn_out", numbered(1), r"given \(1,\), expected \(5,\)"),
    ("mlp_1", (numbered(INNER, HIDDEN), numbered(INNER, 1)), r"\(10, 1\), expected \(10, 5\) \+ \(10, 5\)"),
    ("mlp_2", numbered(2, HIDDEN, INNER), r"given \(2, 5, 10\), expected \(5, 10\)"),
    ("mlp_2", numbered(HIDDEN, INNER).to(torch.int8), r"holds torch\.int8, expected one of torch\.float32, "),
    ("qkv", (Q, K.to(torch.float8_e4m3fn), V), r"holds torch\.float8_e4m3fn, expected one of"),
]


@pytest.mark.parametrize(("name", "value", "message"), UNFIT)
def test_tensors_that_do_not_make_up_the_weight(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(model(), f"transform_{name}_param")(value)


def test_a_parameter_names_itself_when_its_tensors_do_not_fit() -> None:
    parameter = FusedQKVParameter(model(), None, "qkv")
    with pytest.raises(WeightError, match=r"^qkv: given \(12, 5\), expected \(24, 5\)"):
        parameter.params = Q


def test_absent_tensors_stay_none() -> None:
    it = model()
    assert it.transform_qkv_param((None, None, None)) is None and it.transform_mlp_2_param(None) is None
    assert it.transform_norm_param(None) is None and it.transform_unembed_param(None) is None


def test_a_head_wise_layout_is_refused_with_fewer_kv_heads() -> None:
    parameter = MegatronQKVParameter(model(), None, "qkv")
    with pytest.raises(WeightError, match=r"4 query and 2 KV heads, .* GQAMegatronQKVParameter has"):
        parameter.params = numbered((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)


def test_a_source_that_gives_another_part_than_was_asked_for() -> None:
    class Broken(RecordingSource):
        def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
            return super().read(name, index)[:1]

    with pytest.raises(ValueError, match=r"w: asked for a part of \(5, 10\), the source gave \(1, 10\)"):
        model().transform_mlp_2_param(Broken({"w": numbered(HIDDEN, INNER)}).tensor("w"))


def test_rows_read_only_what_they_cover() -> None:
    source = RecordingSource({"w": numbered(10, 2)})
    picked = Rows(source.tensor("w"), [(7, 2), (0, 3), (5, 1)])
    whole = numbered(10, 2)[[7, 8, 0, 1, 2, 5]]
    assert picked.shape == (6, 2) and picked.dtype == torch.float32
    for start in range(7):
        for stop in range(start, 7):
            source.reads.clear()
            found = picked[slice(start, stop), slice(0, 1)]
            assert torch.equal(found, whole[start:stop, :1])
            assert source.elements_read() == stop - start
