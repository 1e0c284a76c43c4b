from __future__ import annotations

import argparse
import copy
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx as deepspeed
from phalanx.training.dataloader import ShardedLoader
from tests.training.ranks import run_cases

SMALL = {"train_batch_size": 2}


@pytest.mark.parametrize("world", [2, 4])
def test_on_ranks(world: int, tmp_path: Path) -> None:
    results = run_cases(("tests.training.deepspeed_cases",), world, tmp_path)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert not failed, "\n".join(failed)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def initialize(module=None, **given):
    module = model() if module is None else module
    given.setdefault("config", SMALL)
    return deepspeed.initialize(model=module, optimizer=given.pop("optimizer", sgd(module)), **given)


def test_one_process_without_a_launcher_trains():
    engine, optimizer, loader, schedule = initialize()
    expected = model()
    x = torch.ones(2, 3)
    engine.backward(engine(x).sum())
    engine.step()
    expected(x).sum().backward()
    sgd(expected).step()
    assert torch.allclose(engine.module.weight, expected.weight)
    assert loader is None and schedule is None and optimizer is engine.optimizer


def test_the_model_must_be_a_module():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        deepspeed.initialize(config=SMALL)


def test_what_torch_compile_has_wrapped_is_refused():
    inside = nn.Sequential(torch.compile(model()))
    for wrapped, what in (torch.compile(model()), "the model"), (inside, "0"):
        with pytest.raises(ValueError, match=rf"^{what} was wrapped by torch.compile.*engine.compile\(\)"):
            initialize(wrapped)


def test_the_config_from_arguments(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SMALL))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    assert initialize(args=args, config=None)[0].train_batch_size() == 2
    with pytest.raises(ValueError, match=r"given by config and by args\.deepspeed_config"):
        initialize(args=args, config=SMALL)
    assert parser.parse_args([]).deepspeed_config is None
    assert initialize(args=parser.parse_args([]))[0].train_batch_size() == 2


def test_the_old_name_of_config():
    assert initialize(config=None, config_params=SMALL)[0].train_batch_size() == 2
    with pytest.raises(ValueError, match="config and by config_params"):
        initialize(config_params=SMALL)
    with pytest.raises(ValueError, match="needs a DeepSpeed config"):
        initialize(config=None)


def test_a_local_rank_that_contradicts_the_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="local_rank is 0"):
        initialize(args=argparse.Namespace(local_rank=0))
    assert initialize(args=argparse.Namespace(local_rank=-1))


def test_mesh_param_is_refused():
    with pytest.raises(ValueError, match="mesh_param"):
        initialize(mesh_param=(1, 1))


def test_the_callers_optimizer_goes_before_the_configs(caplog):
    named = {**SMALL, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {}}}
    module = model()
    held = sgd(module)
    schedule = torch.optim.lr_scheduler.StepLR(held, 1)
    _, optimizer, _, used = initialize(module, optimizer=held, lr_scheduler=schedule, config=named)
    assert optimizer is held and used is schedule
    assert "config's optimizer (AdamW) is not used" in caplog.text
    assert "config's scheduler (WarmupLR) is not used" in caplog.text


def test_a_schedule_of_another_optimizer():
    schedule = torch.optim.lr_scheduler.StepLR(sgd(model()), 1)
    with pytest.raises(ValueError, match="another optimizer"):
        initialize(lr_scheduler=schedule)


def test_a_schedule_without_an_optimizer():
    with pytest.raises(ValueError, match="needs an optimizer"):
        initialize(optimizer=None, config={**SMALL, "scheduler": {"type": "WarmupLR"}})


def test_names_of_the_config_are_read_before_anything_happens():
    module = model()
    for named in ({"optimizer": {"type": "Lamb"}}, {"optimizer": {"type": "Adam"}, "scheduler": {"type": "Warmup"}}):
        with pytest.raises(ValueError):
            deepspeed.initialize(model=module, config={**SMALL, **named})


@pytest.mark.parametrize("optimizer", [3, lambda parameters: "none"])
def test_what_is_no_optimizer(optimizer):
    with pytest.raises(TypeError):
        initialize(optimizer=optimizer)


def test_model_parameters_in_groups():
    module = model()
    groups = [{"params": [module.weight], "lr": 0.5}]
    named = {**SMALL, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    _, optimizer, _, _ = deepspeed.initialize(model=module, model_parameters=groups, config=named)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_hints_and_state_are_logged_once(caplog):
    caplog.set_level(logging.INFO)
    initialize(config={**SMALL, "dump_state": True, "steps_per_print": 5})
    assert caplog.text.count("steps_per_print\n") == 1
    assert '"train_batch_size": 2' in caplog.text


def test_the_config_is_not_changed():
    given = {**SMALL, "tensor_parallel": {}, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    before = copy.deepcopy(given)
    module = deepspeed.tp_model_init(model(), tp_size=1, dtype=torch.float32)
    deepspeed.initialize(model=module, config=given)
    assert given == before


class TestTPModelInit:
    def test_is_used_up_by_initialize(self):
        module = deepspeed.tp_model_init(model(), tp_size=2, dtype=torch.float32)
        with pytest.raises(ValueError, match="does not divide the 1 ranks"):
            initialize(module)
        assert initialize(module)

    def test_is_for_its_model_only(self):
        held = deepspeed.tp_model_init(model(), tp_size=2, dtype=torch.float32)
        assert initialize(model()) and held

    def test_is_found_in_a_wrapped_model(self):
        with pytest.raises(ValueError, match="does not divide"):
            initialize(nn.Sequential(deepspeed.tp_model_init(model(), tp_size=2)))

    def test_survives_a_copy_of_the_model(self):
        with pytest.raises(ValueError, match="does not divide"):
            initialize(copy.deepcopy(deepspeed.tp_model_init(model(), tp_size=2)))

    @pytest.mark.parametrize(("size", "dtype"), [(4, torch.float32), (2, torch.bfloat16)])
    def test_another_call_that_conflicts(self, size, dtype):
        module = deepspeed.tp_model_init(model(), tp_size=2, dtype=torch.float32)
        assert deepspeed.tp_model_init(module, tp_size=2, dtype=torch.float32) is module
        with pytest.raises(ValueError, match="Conflicting tp_model_init arguments"):
            deepspeed.tp_model_init(module, tp_size=size, dtype=dtype)

    @pytest.mark.parametrize(
        ("config", "told"),
        [
            ({"tensor_parallel": {"autotp_size": 1}}, r"autotp_size in config \(1\) and tp_model_init \(2\)"),
            ({"bf16": {"enabled": True}}, r"config uses torch.bfloat16 .* requested torch.float32"),
            ({"fp16": {"enabled": True}}, r"config uses torch.float16 .* requested torch.float32"),
        ],
    )
    def test_a_config_that_conflicts(self, config, told):
        module = deepspeed.tp_model_init(model(), tp_size=2, dtype=torch.float32)
        with pytest.raises(ValueError, match=told):
            initialize(module, config={**SMALL, **config})
        with pytest.raises(ValueError, match=told):
            deepspeed.tp_model_init(model(), tp_size=2, dtype=torch.float32, config=config)

    @pytest.mark.parametrize("size", [0, -1, "2", True])
    def test_sizes(self, size):
        with pytest.raises(ValueError, match="tp_size"):
            deepspeed.tp_model_init(model(), tp_size=size)


def test_set_autotp_mode():
    deepspeed.set_autotp_mode(training=True)
    with pytest.raises(ValueError, match=r"phalanx\.LLM"):
        deepspeed.set_autotp_mode()


def test_accelerator():
    here = deepspeed.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert here.device_name().startswith(kind) and here.device().type == kind and here.device_count() >= 1
    here.reset_peak_memory_stats()
    here.synchronize()
    here.empty_cache()
    assert here.max_memory_allocated() >= here.memory_allocated() >= 0


def test_init_distributed_alone():
    # In a process of its own: a process group is one a process.
    code = (
        "import phalanx as d, torch.distributed as dist\n"
        "d.init_distributed(); d.init_distributed()\n"
        "assert (d.comm.get_rank(), d.comm.get_world_size(), d.comm.get_local_rank()) == (0, 1, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_init_distributed_may_be_forbidden():
    with pytest.raises(ValueError, match="call init_distributed"):
        deepspeed.init_distributed(dist_init_required=False)
    with pytest.raises(ValueError, match="call init_distributed"):
        initialize(dist_init_required=False)


def test_mpirun_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="phalanx launch"):
        deepspeed.init_distributed()


def test_a_stream_of_samples_is_no_training_data():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(TypeError, match="DataLoader of your own"):
        initialize(training_data=Stream())


def test_the_last_batch_may_be_dropped():
    samples = [torch.tensor(float(i)) for i in range(5)]
    for drop, count in ((False, 3), (True, 2)):
        loader = initialize(config={**SMALL, "dataloader_drop_last": drop}, training_data=samples)[2]
        assert isinstance(loader, ShardedLoader) and len(loader) == len(list(loader)) == count


def test_the_order_of_a_pass_can_be_chosen():
    loader = initialize(training_data=[torch.tensor(i) for i in range(8)])[2]
    first, second = torch.cat(list(loader)).tolist(), torch.cat(list(loader)).tolist()
    assert first != second and sorted(first) == list(range(8))
    loader.set_epoch(0)
    assert torch.cat(list(loader)).tolist() == first


def test_batches_are_collated():
    loader = initialize(training_data=[1, 2, 3, 4], collate_fn=sum)[2]
    assert sum(loader) == 10
