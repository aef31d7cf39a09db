"""Fine-tunes a language model, whole or by LoRA: torchrun --nproc-per-node 2 train_finetune.py --lora --compressor int8.

The first run makes the model: it pretrains a small GPT on PyTorch's source code. All runs fine-tune it on Python's manual.
`--model gpt2` takes a model of the Hub's instead, with its tokenizer.
"""

import argparse
import json
import math
import pydoc_data
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import gradwire
from gradwire.transformers import GradwireCallback

SOURCE = Path(torch.nn.__path__[0], "modules")  # the text to pretrain on
MANUAL = Path(pydoc_data.__path__[0])  # the text to fine-tune on


class Text(Dataset[dict[str, torch.Tensor]]):
    """Stretches of a text's tokens: the first nine tenths of it, or the last tenth."""

    def __init__(self, path: Path, tokenizer: Any, context: int, *, validation: bool = False) -> None:
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        cut = len(text) * 9 // 10
        text = text[cut:] if validation else text[:cut]
        tokens = tokenizer(text.decode(errors="replace"))["input_ids"] if tokenizer else list(text)
        self.samples = torch.tensor(tokens).split(context)[:-1]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--compressor", default="int8", help="none, bf16, int8, int4, ...")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 8 instead of all weights")
    parser.add_argument("--model", help="a folder or a name of the Hub's; by default the small GPT")
    parser.add_argument("--text", type=Path, default=MANUAL, help="a file or folder to fine-tune on")
    parser.add_argument("--lr", type=float, help="by default 5e-4, with LoRA 5e-3")
    for name, value in {
        "pretrain_steps": 300,
        "steps": 100,
        "seed": 0,
        "batch": 8,
        "context": 128,
        "width": 128,
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=" ")
    return parser.parse_args()


def trainer(model: Any, text: Path, tokenizer: Any, args: argparse.Namespace, **options: Any) -> Trainer:
    settings = TrainingArguments(
        "finetune-output",
        per_device_train_batch_size=args.batch,
        seed=args.seed,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        **options,
    )
    data = Text(text, tokenizer, args.context), Text(text, tokenizer, args.context, validation=True)
    return Trainer(model, settings, train_dataset=data[0], eval_dataset=data[1])


def pretrained(args: argparse.Namespace, folder: Path) -> Path:
    """Return the folder with the small GPT, which the first run fills."""
    if not folder.exists():
        torch.manual_seed(0)
        sizes = {"n_embd": args.width, "n_layer": 4, "n_head": 4, "n_positions": args.context, "vocab_size": 256}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        made = trainer(model, SOURCE, None, args, max_steps=args.pretrain_steps, learning_rate=2e-3)
        made.train()
        made.save_model(str(folder))  # rank 0 alone writes
        dist.barrier()
    return folder


def main() -> None:
    args = arguments()
    gradwire.init_process_group()  # NCCL if each rank has a GPU, else Gloo
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(args.model or pretrained(args, Path("small-gpt")))
    torch.manual_seed(args.seed)
    if args.lora:
        model = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    lr = args.lr or (5e-3 if args.lora else 5e-4)
    run = trainer(model, args.text, tokenizer, args, max_steps=args.steps, learning_rate=lr)
    run.add_callback(callback := GradwireCallback(run, args.compressor))  # gradwire: the line to add
    run.train()
    loss = run.evaluate()["eval_loss"]
    if run.is_world_process_zero():
        sent = round(callback.compression.stats().last.traffic.sent_bytes)
        found = {"validation_loss": loss, "perplexity": math.exp(loss), "sent_bytes_per_step": sent}
        print(json.dumps({**vars(args), "text": args.text.name, "lr": lr, "ranks": run.args.world_size, **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
