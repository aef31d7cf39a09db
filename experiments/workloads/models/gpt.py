"""A decoder-only transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GPT(nn.Module):
    """A causal language model with learned positions and normalisation before each block (Radford et al. 2019)."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width is a multiple of model.heads, got {width} and {heads}")
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.blocks.parameters():  # TransformerEncoder starts with copies of one layer
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
        nn.init.normal_(self.positions.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the next token, from tokens (batch, positions)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions(positions), mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits
