"""Pictures name compressors as people do."""

import pytest

from gradwire.experiments.results.words import in_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "uncompressed"),
        ("bf16", "16 bits (bf16)"),
        ("topk:ratio=0.001", "top-k 0.1 %"),
        ("fp16+powersgd:rank=4", "PowerSGD rank 4, 16 bits (fp16)"),
        ("powersgd:rank=8,payload=int8", "PowerSGD rank 8, 8-bit factors"),
        ("int8/int4", "8 bits / 4 bits"),
        ("onebit:start_iter=20", "1 bit, 20 warm-up steps"),
        ("a text: of another kind", "a text: of another kind"),
    ],
)
def test_a_compressor_is_named_in_words(text, words):
    assert in_words(text) == words
