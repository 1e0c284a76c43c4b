"""One rank of `phalanx train`: `python -m phalanx.training.run RECIPE [--resume] [--base FOLDER]`, under torchrun or
alone. Model, data and engine of a recipe, and the loop."""

from __future__ import annotations

import argparse
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from phalanx.config import ConfigError
from phalanx.parallel.loading import from_pretrained
from phalanx.training.checkpoint_folder import Saved, check_new_run, newest_tag
from phalanx.training.comm import init_distributed
from phalanx.training.deepspeed import initialize
from phalanx.training.engine import TrainingEngine
from phalanx.training.fused_adam import FusedAdam
from phalanx.training.journal import Journal, flops_of_token, peak_flops
from phalanx.training.recipe import OptimizationRecipe, Recipe, read_recipe
from phalanx.training.same_data import check_data, mark_of_data
from phalanx.training.text_data import Samples, batches, read_samples
from phalanx.training.together import most

_log = logging.getLogger(__name__)
_RANK_0_SECONDS = 5.0
"""How long another rank waits for rank 0 to say what is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 with one line of what is wrong; 143 where SIGTERM ended the run, after a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--base", help="the folder of the model, where the recipe's name is no folder")
    given = parser.parse_args(arguments)
    try:
        code = train(read_recipe(given.recipe), resume=given.resume, base=given.base)
        if dist.is_initialized():
            # Threads of a group that is still there when Python ends can abort a run that went well.
            dist.destroy_process_group()
        return code
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigError) and int(os.environ.get("RANK", "0")):
            # Rank 0 most likely says the same, and its end ends this rank; else it is said here.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_RANK_0_SECONDS)
        print(f"phalanx train: {error}", file=sys.stderr)
        return 1


def train(recipe: Recipe, *, resume: bool = False, base: str | None = None) -> int:
    """Trains what a recipe says; called by all ranks.

    Args:
        resume: go on from the newest checkpoint in the output folder, where there is one.

    Raises:
        ConfigError: what cannot be done as it is said; before training.
    """
    how, folder = recipe.optimization, Path(recipe.output.folder)
    if not dist.is_initialized() and "RANK" in os.environ:
        init_distributed()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % recipe.parallel.tensor_parallel_size:
        raise ConfigError(
            f"parallel.tensor_parallel_size={recipe.parallel.tensor_parallel_size} does not divide {world} ranks"
        )
    checkpoints = folder / "checkpoints"
    if not resume:
        check_new_run(checkpoints)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output.folder={recipe.output.folder!r} cannot be made: {error}") from None
    _check_length(recipe, base)
    tokenizer = _tokenizer(base or recipe.model.path)
    samples = read_samples(recipe.data, recipe.data.train, tokenizer)
    held_out = read_samples(recipe.data, recipe.data.validation, tokenizer) if recipe.data.validation else None
    if resume and (tag := newest_tag(checkpoints)) is not None:
        with Saved(checkpoints / tag) as saved:
            check_data(saved.index["client_state"], recipe, samples)
    steps = how.steps or math.ceil((how.epochs or 0) * len(samples) / how.batch_size)
    engine = _engine(recipe, world, steps, base)
    if resume:
        engine.load_checkpoint(checkpoints)
        _follow(recipe, engine, steps)
    stopped = _Stop(engine)
    loop = _Loop(recipe, engine, samples, held_out, steps, checkpoints)
    try:
        finished = loop.run(stopped)
    finally:
        loop.journal.close()
    where = f"the run is in {folder}"
    if not finished:
        where += "; go on with --resume"
    elif recipe.output.export:
        model = folder / "model"
        engine.save_pretrained(model, tokenizer=tokenizer)
        where += f', its model in {model}; try it: phalanx generate {shlex.quote(str(model))} "..."'
    if engine.mesh.dp.rank == engine.mesh.tp.rank == 0:
        print(where, file=sys.stderr)
    return 0 if finished else 128 + signal.SIGTERM


class _Loop:
    """The steps of a run."""

    def __init__(
        self,
        recipe: Recipe,
        engine: TrainingEngine,
        samples: Samples,
        held_out: Samples | None,
        steps: int,
        checkpoints: Path,
    ) -> None:
        self.recipe, self.engine, self.samples, self.held_out = recipe, engine, samples, held_out
        self.steps, self.checkpoints = steps, checkpoints
        self.client_state = {"data": mark_of_data(recipe, samples)}
        mesh = engine.mesh
        self.first = mesh.dp.rank == mesh.tp.rank == 0
        self.journal = Journal(
            Path(recipe.output.folder),
            engine.global_steps,
            steps,
            tensorboard=recipe.output.tensorboard,
            silent=not self.first,
        )
        parameters = sum(math.prod(layout.shape) for layout in engine.registry.values())
        self._token_flops = flops_of_token(engine.module, recipe.data.sequence_length, parameters - _embedding(engine))
        self._peak = peak_flops(mesh.device)

    def run(self, stopped: _Stop) -> bool:
        """All steps that are left; False where a signal ended it, after a checkpoint."""
        how, out, engine = self.recipe.optimization, self.recipe.output, self.engine
        engine.train()
        order = batches(len(self.samples), how.batch_size, how.seed, engine.global_steps)
        profiled, tracing = out.profile_steps, False
        with _profile(self.first and profiled is not None) as profiler:
            while engine.global_steps < self.steps:
                step = engine.global_steps + 1
                if profiler is not None and profiled is not None and not tracing and profiled[0] <= step <= profiled[1]:
                    profiler.start()
                    tracing = True
                begun = time.perf_counter()
                loss = self._step(next(order))
                if step % out.log_every == 0 or step == self.steps:
                    self._say(step, float(loss), time.perf_counter() - begun)
                    self._check(step, float(loss))
                if profiler is not None and profiled is not None and tracing and step in (profiled[1], self.steps):
                    tracing = False
                    profiler.stop()
                    profiler.export_chrome_trace(str(Path(out.folder) / "trace.json"))
                if out.validate_every and step % out.validate_every == 0 and step < self.steps:
                    self._validate(step)
                ended = stopped.asked()
                if ended or step == self.steps or (out.checkpoint_every and step % out.checkpoint_every == 0):
                    self._check(step, float(loss))
                    self._save()
                if ended and step < self.steps:
                    return False
        self._validate(self.steps)
        return True

    def _step(self, rows: list[int]) -> Tensor:
        """One update; the mean loss over the targets of the whole batch."""
        engine, mesh, size = self.engine, self.engine.mesh, self.recipe.optimization.micro_batch_size
        mine = rows[mesh.dp.rank :: mesh.dp.size]
        # The engine takes the mean over passes and ranks; every target of the batch is to count alike.
        targets = max(1, self.samples.learnt(rows)) / (mesh.dp.size * engine.gradient_accumulation_steps())
        losses = []
        for start in range(0, len(mine), size):
            batch = self.samples.take(mine[start : start + size], mesh.device)
            loss = engine(**batch, num_items_in_batch=torch.tensor(targets, device=mesh.device)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        return mesh.dp.all_reduce(torch.stack(losses).mean()) / mesh.dp.size

    def _say(self, step: int, loss: float, seconds: float) -> None:
        tokens = self.recipe.optimization.batch_size * self.recipe.data.sequence_length
        mesh = self.engine.mesh
        flops = self._token_flops * tokens / seconds / (mesh.tp.size * mesh.dp.size)
        self.journal.say(
            {
                "step": step,
                "loss": loss,
                "learning_rate": self.engine.get_lr()[0],
                "grad_norm": self.engine.get_global_grad_norm(),
                "tokens_per_second": tokens / seconds,
                "mfu": None if self._peak is None else flops / self._peak,
                "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if mesh.device.type == "cuda" else None,
                "seconds": seconds,
            }
        )

    def _check(self, step: int, loss: float) -> None:
        """Raises ConfigError for weights that are not finite any more: no checkpoint may hold them."""
        norm = self.engine.get_global_grad_norm()
        # What a step skips for an overflow does no harm.
        broken = self.engine.was_step_applied() and norm is not None and not math.isfinite(norm)
        if broken or not math.isfinite(loss):
            what = "gradient norm" if math.isfinite(loss) else "loss"
            raise ConfigError(
                f"the {what} of step {step} is {norm if math.isfinite(loss) else loss}: lower the learning rate, or "
                "look at the data"
            )

    @torch.no_grad()
    def _validate(self, step: int) -> None:
        """The mean loss over all targets of the validation samples."""
        if self.held_out is None:
            return
        engine, mesh, size = self.engine, self.engine.mesh, self.recipe.optimization.micro_batch_size
        engine.eval()
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        rounds = -(-len(self.held_out) // (size * mesh.dp.size))
        for number in range(rounds):
            start = (number * mesh.dp.size + mesh.dp.rank) * size
            # Every rank takes part in every round; what lies beyond the end is computed and not counted.
            rows = [min(row, len(self.held_out) - 1) for row in range(start, start + size)]
            counted = [row for row in range(start, start + size) if row < len(self.held_out)]
            batch = self.held_out.take(rows, mesh.device)
            batch["labels"][len(counted) :] = -100
            targets = self.held_out.learnt(counted) if counted else 0
            # One target at least, so that a mean is defined where nothing counts.
            items = torch.tensor(max(targets, 1), device=mesh.device)
            loss = engine(**batch, num_items_in_batch=items).loss
            if targets:
                total += torch.stack(
                    [loss.double() * targets, torch.tensor(float(targets), device=mesh.device).double()]
                )
        total = mesh.dp.all_reduce(total)
        engine.train()
        self.journal.say({"step": step, "validation_loss": float(total[0] / total[1].clamp_min(1))})

    def _save(self) -> None:
        self.engine.save_checkpoint(self.checkpoints, client_state=self.client_state)
        if self.first:
            for old in _older(self.checkpoints, self.engine.global_steps)[self.recipe.output.keep - 1 :]:
                shutil.rmtree(old)


def _older(checkpoints: Path, step: int) -> list[Path]:
    """The run's checkpoints of other steps than the one just saved, the latest written first. Folders of other names
    are somebody's own."""
    tags = [path for path in checkpoints.glob("global_step*") if path.name.removeprefix("global_step").isdecimal()]
    found = [path for path in tags if (path / "index.json").is_file() and path.name != f"global_step{step}"]
    return sorted(found, key=lambda path: (path / "index.json").stat().st_mtime_ns, reverse=True)


class _Stop:
    """Whether any rank was told to end (SIGTERM); asked by all ranks together."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._mesh = engine.mesh
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def asked(self) -> bool:
        return bool(most(self._mesh, int(self._told))[0])

    def _tell(self, number: int, frame: Any) -> None:
        self._told = True


def _engine(recipe: Recipe, world: int, steps: int, base: str | None) -> TrainingEngine:
    how = recipe.optimization
    torch.manual_seed(how.seed)
    model = from_pretrained(base or recipe.model.path, dtype="float32", use_cache=False)
    if recipe.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = FusedAdam(
        [{"params": decayed, "weight_decay": how.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=how.learning_rate,
    )
    schedule = LambdaLR(optimizer, lambda step: rate(how, step, steps))
    engine, _, _, _ = initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=recipe.engine_config(world // recipe.parallel.tensor_parallel_size),
    )
    return engine


def _follow(recipe: Recipe, engine: TrainingEngine, steps: int) -> None:
    """After a checkpoint was read: rates and decay are those of the recipe, which may have changed; that is said.

    Raises ConfigError for a run that has gone further than the recipe says.
    """
    how, schedule = recipe.optimization, engine.lr_scheduler
    if engine.global_steps > steps:
        raise ConfigError(
            f"the newest checkpoint is of step {engine.global_steps}, and the recipe ends at step {steps}: train for "
            "more steps or epochs, or choose another output.folder"
        )
    if engine.optimizer is None or not isinstance(schedule, LambdaLR):
        return
    before = schedule.base_lrs[0], engine.optimizer.param_groups[0]["weight_decay"]
    now = how.learning_rate, how.weight_decay
    for name, was, value in zip(("learning_rate", "weight_decay"), before, now, strict=True):
        if was != value and engine.global_steps and engine.mesh.dp.rank == engine.mesh.tp.rank == 0:
            _log.warning("%s is %g from step %d on; it was %g", name, value, engine.global_steps + 1, was)
    schedule.base_lrs = [how.learning_rate] * len(schedule.base_lrs)
    for group, decay in zip(engine.optimizer.param_groups, (how.weight_decay, 0.0), strict=True):
        group["initial_lr"], group["weight_decay"] = how.learning_rate, decay
        group["lr"] = how.learning_rate * rate(how, schedule.last_epoch, steps)


def rate(how: OptimizationRecipe, step: int, steps: int) -> float:
    """The learning rate of a step (from 0 on) as a part of the highest: a linear warm-up, then the schedule, whose end
    is a tenth for the cosine and 0 for the line."""
    if step < how.warmup_steps:
        return (step + 1) / (how.warmup_steps + 1)
    if how.schedule == "constant":
        return 1.0
    done = (step - how.warmup_steps) / max(1, steps - how.warmup_steps)
    if how.schedule == "linear":
        return max(0.0, 1.0 - done)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def _embedding(engine: TrainingEngine) -> int:
    """Parameters of the input embedding, which are looked up; 0 where they are the head too."""
    get = getattr(engine.module, "get_input_embeddings", None)
    table = None if get is None else get()
    if not isinstance(table, nn.Module) or getattr(engine.module.config, "tie_word_embeddings", False):
        return 0
    name = next((n for n, m in engine.module.named_modules() if m is table), "")
    return math.prod(engine.registry[f"{name}.weight"].shape)


def _check_length(recipe: Recipe, base: str | None) -> None:
    """Raises ConfigError for samples that are longer than what the model was made for."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(base or recipe.model.path).get_text_config()
    except (OSError, ValueError):
        return  # what loads the model says it better
    limit, length = getattr(config, "max_position_embeddings", None), recipe.data.sequence_length
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    stretched = rope.get("rope_type", "default") != "default"
    if isinstance(limit, int) and 0 < limit < length and not stretched:
        raise ConfigError(
            f"data.sequence_length={length} is more than the {limit} positions of the model "
            f"(max_position_embeddings): lower it"
        )


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no tokenizer that can be read: {error}") from None


@contextmanager
def _profile(wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    from torch.profiler import profile

    yield profile()


if __name__ == "__main__":
    sys.exit(main())
