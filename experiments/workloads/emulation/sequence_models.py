"""Models for texts."""

from __future__ import annotations

from collections.abc import Iterator

from .layer_definitions import LayerDefinition, embedding, linear, lstm, norm


def bert(blocks: int, width: int, tokens: int) -> Iterator[LayerDefinition]:
    """BERT for 30,522 word pieces, with its pooler and without a head, on `tokens` tokens a sample (Devlin et al. 2019)."""
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield LayerDefinition(f"embeddings.{name}_embeddings", {"weight": (rows, width)})
    yield norm("embeddings.LayerNorm", width)
    for block in range(blocks):
        name = f"encoder.layer.{block}"
        for part in ("query", "key", "value"):
            yield linear(f"{name}.attention.self.{part}", width, width, tokens)
        yield LayerDefinition(
            f"{name}.attention.self", {}, 4 * tokens * tokens * width
        )  # scores, and values weighed by them
        yield linear(f"{name}.attention.output.dense", width, width, tokens)
        yield norm(f"{name}.attention.output.LayerNorm", width)
        yield linear(f"{name}.intermediate.dense", width, 4 * width, tokens)
        yield linear(f"{name}.output.dense", 4 * width, width, tokens)
        yield norm(f"{name}.output.LayerNorm", width)
    yield linear("pooler.dense", width, width)


def transformer(blocks: int, width: int, tokens: int) -> Iterator[LayerDefinition]:
    """A transformer on bytes, of torch's encoder layers with normalisation first, on `tokens` tokens a sample."""
    yield LayerDefinition("0", {"weight": (256, width)})
    for block in range(blocks):
        name = f"1.layers.{block}"
        yield norm(f"{name}.norm1", width)
        projections = {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
        yield LayerDefinition(
            f"{name}.self_attn",
            {**projections, "out_proj.weight": (width, width), "out_proj.bias": (width,)},
            8 * width * width * tokens + 4 * tokens * tokens * width,
        )
        yield norm(f"{name}.norm2", width)
        yield linear(f"{name}.linear1", width, 4 * width, tokens)
        yield linear(f"{name}.linear2", 4 * width, width, tokens)
    yield linear("2", width, 256, tokens)


def sockeye(source_words: int, target_words: int, embedded: int, width: int, tokens: int) -> Iterator[LayerDefinition]:
    """An encoder-decoder for translation: a bidirectional LSTM, an LSTM with attention, one layer each, as the first
    version of Sockeye trained by default (Hieber et al. 2017), on `tokens` words of either language a sample.
    """
    yield embedding("encoder.embedding", source_words, embedded)
    yield lstm("encoder.lstm", embedded, width // 2, tokens, bidirectional=True)
    yield embedding("decoder.embedding", target_words, embedded)
    yield lstm("decoder.lstm", embedded + width, width, tokens)
    yield linear("decoder.attention.query", width, width // 4, tokens)
    yield linear("decoder.attention.key", width, width // 4, tokens)
    yield LayerDefinition(
        "decoder.attention.score", {"weight": (1, width // 4)}, 2 * (width // 4 + width) * tokens * tokens
    )
    yield linear("decoder.hidden", 2 * width, width, tokens)
    yield linear("decoder.output", width, target_words, tokens)
