"""transformers' Trainer with compressed gradients: torchrun --nproc-per-node 2 train_transformers.py."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from gradwire.transformers import GradwireCallback

FOLDER = Path("transformers-checkpoints")
FOLDER.mkdir(exist_ok=True)

torch.manual_seed(0)
sizes = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
model = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=16))
words = torch.randint(100, (256, 16))
data = [{"input_ids": sentence, "labels": (sentence[0] < 50).long()} for sentence in words]
arguments = TrainingArguments(
    FOLDER,
    per_device_train_batch_size=16,
    num_train_epochs=4,
    save_strategy="epoch",
    logging_steps=8,
    disable_tqdm=True,
    report_to=[],
    ddp_find_unused_parameters=False,  # all of them are used in every step
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.add_callback(callback := GradwireCallback(trainer, "int4"))
whole = sorted(FOLDER.glob("checkpoint-*/gradwire.pt"), key=lambda path: int(path.parent.name.split("-")[1]))
last = str(whole[-1].parent) if whole else None  # gradwire.pt is written last: a kill leaves a checkpoint without it
trainer.train(resume_from_checkpoint=last)

if trainer.is_world_process_zero() and callback.compression is not None:
    stats = callback.compression.stats()
    print(f"{stats.steps} synchronized steps, {stats.last.traffic.payload_bytes} payload bytes in the last one")
