"""The language model of the PowerSGD paper."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """Embedding, LSTM and a tied output layer: with the defaults of WikiText-2 28,949,319 parameters (Vogels 2019)."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the next token, from tokens (batch, positions)."""
        hidden, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(hidden)
        return logits
