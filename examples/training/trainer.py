"""transformers' Trainer on any grid of ranks: tensor parallel x data parallel x ZeRO.

    phalanx launch --no-local-rank --nproc 4 examples/training/trainer.py --use_cpu --tp 2 --output_dir out

Every argument of TrainingArguments is one of this script. What differs from a script for one process: the mixin in
front of Trainer, and the config that it is given. With `--deepspeed ds.json` in place of `--tp` and `--zero`, it is the
stock Trainer, and the package in `shim/` has to be installed.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from phalanx import TPTrainerMixin

HERE = Path(__file__).parent


@dataclass
class Arguments:
    model: str = field(
        default=str(HERE / "configs" / "llama-tiny.json"),
        metadata={"help": "a folder or hub id, or a config (.json) for random weights, which reads bytes as tokens"},
    )
    text: str = field(default=str(HERE / "README.md"), metadata={"help": "a text file to learn"})
    length: int = field(default=32, metadata={"help": "tokens of a sample"})
    tp: int = field(default=1, metadata={"help": "ranks that share one copy of the model"})
    zero: int = field(default=1, metadata={"help": "ZeRO stage: what the copies share, 0 to 3"})


class MyTrainer(TPTrainerMixin, Trainer):
    """All that a Trainer needs in order to run on a model that is cut over ranks."""


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text in samples of `length` tokens; what is left over at its end is not used."""

    def __init__(self, tokens: list[int], length: int) -> None:
        if len(tokens) < length:
            raise SystemExit(f"the text has {len(tokens)} tokens, and a sample {length}: give a longer text")
        self._samples = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._samples[index], "labels": self._samples[index]}


def main(given: list[str] | None = None) -> Trainer:
    # With DeepSpeed's config, transformers makes these before the model.
    args, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses(given)
    set_seed(training.seed)
    text = Path(args.text).read_text(encoding="utf-8")
    if args.model.endswith(".json"):
        tokenizer, tokens = None, list(text.encode())
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        tokens = tokenizer(text)["input_ids"]
        # In float32: `--bf16` computes in 16 bits and keeps these as masters.
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    kind: Any = Trainer
    config: dict[str, Any] = {}
    if training.deepspeed is None:
        kind = MyTrainer
        rules = {"tensor_parallel": {"autotp_size": args.tp}, "zero_optimization": {"stage": args.zero}}
        config = {"phalanx_config": rules}  # batch sizes, clipping and precision are those of TrainingArguments
    trainer = kind(
        model=model, args=training, train_dataset=Windows(tokens, args.length), processing_class=tokenizer, **config
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()  # a folder that stock transformers and `phalanx generate` read
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
