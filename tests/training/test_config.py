from __future__ import annotations

import base64
import copy
import json

import pytest

from phalanx.config import ConfigError
from phalanx.training.config import TrainingConfig
from phalanx.training.keys import ALIASES, AUTO_IS_DEFAULT, BLOCKS, HINTS, IMPLEMENTED, NAMES, REFUSED

PLAIN = {"train_micro_batch_size_per_gpu": 1}


def read(config, world_size=4, **more):
    return TrainingConfig.read(config, world_size=world_size, **more)


def refused(config, world_size=4, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        read(config, world_size, **more)
    return str(caught.value)


def nested(name: str, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def with_plain(extra):
    return {**PLAIN, **extra}


@pytest.mark.parametrize(
    ("given", "tp", "expected"),
    [
        # batch, micro batch, accumulation steps over 4 ranks, each worked out by hand
        ((8, 2, None), 1, (8, 2, 1)),
        ((16, 2, None), 1, (16, 2, 2)),
        ((16, None, 2), 1, (16, 2, 2)),
        ((None, 3, 2), 1, (24, 3, 2)),
        ((8, None, None), 1, (8, 2, 1)),
        ((None, 3, None), 1, (12, 3, 1)),
        ((8, 1, 2), 1, (8, 1, 2)),
        # ranks of one tensor-parallel group count once
        ((8, 2, None), 2, (8, 2, 2)),
        ((None, 3, 2), 4, (6, 3, 2)),
    ],
)
def test_batch_triangle(given, tp, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    done = read({**config, "tensor_parallel": {"autotp_size": tp}})
    assert tuple(getattr(done, name) for name in names) == expected
    assert done.data_parallel_size == 4 // tp


@pytest.mark.parametrize(
    "batch",
    [
        {"train_batch_size": 6},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
        {"train_batch_size": 8, "gradient_accumulation_steps": 3},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
        {"train_batch_size": 2},
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_never_rounded(batch):
    assert "train_batch_size: " in refused(batch)


def test_nothing_said_of_the_batch():
    assert "must be given" in refused({"gradient_accumulation_steps": 2})


@pytest.mark.parametrize("name", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -1, "8", True, 1.5])
def test_batch_sizes_are_counts(name, value):
    assert name in refused({**PLAIN, name: value})


def test_defaults_are_deepspeeds():
    done = read(PLAIN)
    assert (done.gradient_clipping, done.zero.stage, done.zero.reduce_bucket_size) == (0, 0, 500_000_000)
    fp16 = done.fp16
    assert (fp16.enabled, fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window) == (False, 0, 16, 1000)
    assert (fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale) == (2, False, 1)
    assert done.tp_size == 1 and not done.hints


def test_the_published_example():
    given = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"layer_specs": [{"patterns": ["a"], "shape": (3, -1)}]},
        },
        "data_parallel_size": 2,
        "bf16": {"enabled": True},
    }
    before = copy.deepcopy(given)
    done = read(given)
    assert (done.tp_size, done.data_parallel_size, done.zero.stage, done.bf16.enabled) == (2, 2, 2, True)
    assert given == before
    rules = done.tensor_parallel.partition_config
    assert rules is not None and rules.layer_specs[0].shape == (3, -1)


def test_every_fault_of_the_rules_is_told_by_its_path():
    rules = {"layer_specs": [{"patterns": ["a"], "partition_typ": "row"}, {"patterns": ["("]}], "strict": True}
    message = refused(with_plain({"tensor_parallel": {"autotp_size": 2, "partition_config": rules}}))
    lines = [line for line in message.splitlines() if "tensor_parallel.partition_config: " in line]
    assert len(lines) == 3 and "partition_typ" in message and "strict" in message
    assert read(with_plain({"tensor_parallel": {"partition_config": {}}})).tensor_parallel.partition_config is None


def test_sizes_of_buckets_may_be_written_with_an_exponent():
    assert read(with_plain({"zero_optimization": {"reduce_bucket_size": 5e7}})).zero.reduce_bucket_size == 50_000_000


def test_file_and_base64(tmp_path):
    text = json.dumps({**PLAIN, "gradient_clipping": 0.5})
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for given in (path, str(path), encoded):
        assert read(given).gradient_clipping == 0.5


def test_a_key_that_stands_twice(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true, "enabled": false}}')
    assert "'enabled' stands more than once" in refused(path)


def test_comments_are_refused_with_the_line(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n# a comment\n"train_micro_batch_size_per_gpu": 1}')
    message = refused(path)
    assert "line 2" in message and "no comments" in message


@pytest.mark.parametrize("given", ["nowhere.json", "{}", "", 3, None])
def test_what_is_no_config(given):
    refused(given)


@pytest.mark.parametrize(
    ("config", "path", "guess"),
    [
        ({"train_batchsize": 4}, "train_batchsize", "train_batch_size"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "zero_optimization.stage"),
        ({"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size", "tensor_parallel.autotp_size"),
        ({"zero_optimization": {"gradient_clipping": 1.0}}, "zero_optimization.gradient_clipping", "gradient_clipping"),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
        ({"tensor_paralel": {"autotp_size": 2}}, "tensor_paralel", "tensor_parallel"),
    ],
)
def test_unknown_keys_are_refused_by_their_path(config, path, guess):
    line = next(line for line in refused(with_plain(config)).splitlines() if line.strip().startswith(f"{path}:"))
    assert "unknown key" in line and guess in line


def test_every_fault_is_told_at_once():
    message = refused({"a": 1, "amp": {"enabled": True}, "zero_optimization": {"stage": 9}})
    for part in ("a: unknown key", "amp: not implemented", "zero_optimization.stage", "must be given"):
        assert part in message


@pytest.mark.parametrize("name", HINTS)
def test_hints_are_listed(name):
    done = read(with_plain(nested(name, 7)))
    assert done.hints == (name,)


def test_hints_that_ask_for_nothing_are_not_listed():
    off = {"wall_clock_breakdown": False, "flops_profiler": {"enabled": False}, "compile": None}
    assert read(with_plain(off)).hints == ()


def test_hints_are_logged_once_by_name(caplog):
    read(with_plain({"steps_per_print": 10, "zero_optimization": {"overlap_comm": True}})).log_hints()
    assert len(caplog.records) == 1
    assert "steps_per_print, zero_optimization.overlap_comm" in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_refused_keys_are_refused_unless_off(name):
    refusal = REFUSED[name]
    on = {refusal.switch: True, "more": 1} if refusal.switch else {"something": "else"}
    message = refused(with_plain(nested(name, on)))
    assert f"{name}: not implemented" in message and refusal.note in message
    offs = [*refusal.off, None, {}]
    if refusal.switch:
        offs.append({refusal.switch: "none" if refusal.switch == "device" else False, "more": 1})
    for off in offs:
        assert read(with_plain(nested(name, off))).hints == ()


@pytest.mark.parametrize("name", sorted(set(IMPLEMENTED) - AUTO_IS_DEFAULT))
def test_auto_is_refused_where_no_default_stands_for_it(name):
    assert '"auto" is for a Trainer' in refused(with_plain(nested(name, "auto")))


def test_auto_stands_for_a_default():
    given = {}
    for name in AUTO_IS_DEFAULT:
        *parents, leaf = name.split(".")
        at = given
        for parent in parents:
            at = at.setdefault(parent, {})
        at[leaf] = "auto"
    done, plain = read(with_plain(given)), read(PLAIN)
    assert done.model_copy(update={"given": plain.given}) == plain


def test_auto_in_the_arguments_of_an_optimizer():
    message = refused(with_plain({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}}}))
    assert "optimizer.params.lr" in message and "eps" not in message


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_old_names(old, new):
    if new in IMPLEMENTED:
        assert read(with_plain(nested(old, True))).zero.gather_16bit_weights_on_model_save
        both = {"zero_optimization": {old.rpartition(".")[2]: True, new.rpartition(".")[2]: False}}
        assert "the same key as" in refused(with_plain(both))
    elif new in BLOCKS:
        block = {"enabled": True} if new == "bf16" else {"tp_size": 1}
        assert read(with_plain(nested(old, block))).bf16.enabled == (new == "bf16")
    elif new in HINTS:
        assert read(with_plain(nested(old, "fp32"))).hints == (old,)
    else:
        assert "not implemented" in refused(with_plain(nested(old, True)))


def test_zero_optimization_as_a_bool():
    assert read(with_plain({"zero_optimization": True})).zero.stage == 1
    assert read(with_plain({"zero_optimization": False})).zero.stage == 0


@pytest.mark.parametrize("block", ["zero_optimization", "bf16", "tensor_parallel", "tensor_parallel.tp"])
def test_a_block_must_be_an_object(block):
    assert "expected an object" in refused(with_plain(nested(block, 3)))


def test_sizes_against_the_world():
    assert "does not divide the 4 ranks" in refused(with_plain({"tensor_parallel": {"autotp_size": 3}}))
    assert "data_parallel_size: given 4" in refused(
        with_plain({"data_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}})
    )
    assert "is not 4" in refused(with_plain({"tensor_parallel": {"autotp_size": 2}}), dp_size=1)
    assert "tp.tp_size: 4 is not" in refused(with_plain({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}))


def test_contradicting_precisions():
    assert "one dtype" in refused(with_plain({"bf16": {"enabled": True}, "fp16": {"enabled": True}}))


@pytest.mark.parametrize(
    "fault",
    [
        {"gradient_clipping": -1.0},
        {"gradient_clipping": float("nan")},
        {"gradient_clipping": True},
        {"bf16": {"enabled": "true"}},
        {"fp16": {"loss_scale": True}},
        {"fp16": {"loss_scale": float("inf")}},
        {"fp16": {"loss_scale_window": 0}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"reduce_bucket_size": 0}},
        {"tensor_parallel": {"autotp_size": "2"}},
        {"tensor_parallel": {"autotp_size": -2}},
        {"tensor_parallel": {"verify": "maybe"}},
        {"data_types": {"grad_accum_dtype": "int8"}},
        {"optimizer": {"params": {"lr": 1e-3}}},
    ],
)
def test_values_of_the_wrong_kind(fault):
    refused(with_plain(fault))


def test_the_three_classes_do_not_overlap():
    assert len(NAMES) == len(set(NAMES)) and not set(NAMES) & set(ALIASES)
    assert not BLOCKS & set(NAMES)
    assert set(ALIASES.values()) <= set(NAMES) | BLOCKS
