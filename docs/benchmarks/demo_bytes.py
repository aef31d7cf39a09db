"""Bytes per step of DeMo and of gradwire's compressors for the two models of DeMo's paper, by arithmetic.

    python demo_bytes.py

The sizes are those of the configurations that come with DeMo's code (https://github.com/bloc97/DeMo). DeMo keeps the k
largest of each chunk of 64 x 64 elements after a cosine transform, and all-gathers an int64 place and a float32 value for
each. The bytes of gradwire's compressors come from `gradwire.plan`. Nothing is trained.
"""

import torch
from torch import nn

from gradwire import plan

RANKS = 64  # 8 nodes with 8 GPUs each, as in the README of DeMo's code
LAYERS, ROWS = 16, 50304  # blocks; rows of the embedding, which the head shares
WIDTHS = {"OLMo 300 M": 1024, "OLMo 1 B": 2048}
CHUNK, ENTRY = 64 * 64, 8 + 4  # elements; bytes of a place and a value
KEPT = (32, 16, 8, 4, 2, 1)
COMPRESSORS = ("none", "bf16", "int4", "int2", "onebit", "topk:ratio=0.0078125", "topk:ratio=0.000244140625",
               "powersgd:rank=8,payload=int8", "powersgd:rank=32,payload=int4", "powersgd:rank=4,payload=int4")  # fmt: skip


def olmo(width: int) -> nn.Module:
    """Return the parameters of an OLMo: SwiGLU of 8 times the width, no biases, no weights of norms and positions."""
    blocks = [
        nn.ModuleDict({
            "attention": nn.Linear(width, 3 * width, bias=False),
            "out": nn.Linear(width, width, bias=False),
            "up": nn.Linear(width, 8 * width, bias=False),
            "down": nn.Linear(4 * width, width, bias=False),
        })
        for _ in range(LAYERS)
    ]  # fmt: skip
    return nn.ModuleList([nn.Embedding(ROWS, width), *blocks])


def demo_bytes(model: nn.Module, kept: int) -> int:
    """Return the bytes that a rank hands to DeMo's all-gathers in a step."""
    chunks = sum(each.shape[0] // 64 * (each.shape[1] // 64) for each in model.parameters())
    assert chunks * CHUNK == sum(each.numel() for each in model.parameters())
    return chunks * kept * ENTRY


def rows() -> list[tuple[str, list[float]]]:
    """Return (compressor, [payload, sent bytes] of each model)."""
    with torch.device("meta"):
        models = [olmo(width) for width in WIDTHS.values()]
    found = []
    for kept in KEPT:
        payloads = [demo_bytes(model, kept) for model in models]
        found.append((f"DeMo, k = {kept}", [value for each in payloads for value in (each, (RANKS - 1) * each)]))
    for spec in COMPRESSORS:
        plans = [plan(model, spec, world_size=RANKS) for model in models]
        values = [value for each in plans for value in (each.payload_bytes_per_step, each.sent_bytes_per_step)]
        found.append((f"`{spec}`", values))
    return found


def table() -> str:
    """Return the page's table."""
    heads = [f"{name}: {what}" for name in WIDTHS for what in ("given to collectives", f"sent by one of {RANKS} ranks")]
    lines = [f"| compressor | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(f'{v / 1e6:,.2f} MB' for v in values)} |" for name, values in rows())]
    )


if __name__ == "__main__":
    print(table())
