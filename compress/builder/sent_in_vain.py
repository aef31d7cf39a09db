"""Sentences for the log of compressors that send more bytes than they need to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..algorithms.dense import Dense
from ..algorithms.half import Cast
from ..feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from ..protocol.card_traffic import card_bytes
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout, Ranks
from ..simulate import STEADY, requests_of
from .build import compressor as built
from .build import specification, written

MATRIX = 1024, 1024
WORTH = 1.1  # times fewer bytes: what is said of less is not worth a line


def sent_in_vain(compressor: Compressor, dtype: torch.dtype, ranks: Ranks) -> Iterator[str]:
    """Yield a sentence for each way in which a compressor sends more than it needs to.

    Args:
        compressor: the compressor of all buckets.
        dtype: the dtype of the gradients.
        ranks: the ranks on their hosts.
    """
    core = compressor
    while isinstance(core, ErrorFeedback | Float32Arithmetic):
        core = core.inner
    casts = isinstance(core, Cast) and isinstance(core.inner, Dense) and core.sum == "16bit"
    if casts and dtype.itemsize == torch.bfloat16.itemsize:
        yield (
            f"gradients are {str(dtype).removeprefix('torch.')} already, so {specification(compressor)} sends as many bytes "
            "as none: try int8, which sends half of them"
        )
    text = written(compressor)
    if text is None or not 1 < ranks.per_host < ranks.world_size:
        return
    try:
        hosts = built(f"hosts:ranks={ranks.per_host}+{text}")
    except ValueError:  # it has two levels already
        return
    sent = (_through_card(each, dtype, ranks) for each in (compressor, hosts))
    yield from of_hosts(f"hosts+{text}", sent, ranks)


def of_hosts(text: str, sent: Iterable[float], ranks: Ranks) -> Iterator[str]:
    """Yield the sentence that `text` sends less, if it does; `sent`: the bytes that leave a host now, and with it.

    >>> list(of_hosts("hosts+int4", (79.0, 16.0), Ranks(16, 0, 8)))[0][-68:]
    'hosts+int4 sends 4.9x fewer bytes through the network card of a host'
    """
    now, hosts = sent
    if now > WORTH * hosts:
        yield (
            f"each of a host's {ranks.per_host} ranks sends to ranks of other hosts: {text} sends {now / hosts:.1f}x "
            "fewer bytes through the network card of a host"
        )


def _through_card(compressor: Compressor, dtype: torch.dtype, ranks: Ranks) -> float:
    """Return the bytes of a large bucket that leave a host. All-reduces follow a tree, the least that NCCL may send.

    The bucket has an equal matrix for each rank of a host, so that with `hosts+` all of them send the same.
    """
    names = tuple(map(str, range(ranks.per_host)))
    layout = Layout(names, (MATRIX,) * len(names), dtype, torch.device("meta"), ranks)
    return card_bytes(requests_of(compressor, layout, STEADY), ranks, rings=False)
