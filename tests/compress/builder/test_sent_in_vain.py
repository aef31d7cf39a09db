"""Advice for the log: where fewer bytes would do, and nowhere else."""

import pytest
import torch

from gradwire.compress import AllGather, AllToAll, Layout, Ranks, compressor, dry_run
from gradwire.compress.builder.sent_in_vain import sent_in_vain
from gradwire.compress.simulate import STEADY, requests_of

HOSTS = Ranks(world_size=16, per_host=8)
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def told(spec, dtype=FLOAT32, ranks=HOSTS):
    return list(sent_in_vain(compressor(spec), dtype, ranks))


def through_card(spec, ranks):
    """Bytes that leave a host: of each pair in an all-to-all, of one rank of a ring over all, of each rank across hosts."""
    shapes = ((1024, 1024),) * ranks.per_host
    layout = Layout(tuple(map(str, range(ranks.per_host))), shapes, FLOAT32, torch.device("meta"), ranks)
    sent = 0.0
    for request in requests_of(compressor(spec), layout, STEADY):
        size, across = request.tensor.nbytes, request.scope == "across"
        if isinstance(request, AllToAll):
            parts = ranks.hosts if across else ranks.world_size
            sent += ranks.per_host * size / parts * (ranks.hosts - 1) * (1 if across else ranks.per_host)
        elif isinstance(request, AllGather) and request.scope != "host":
            sent += size * (ranks.per_host * (ranks.hosts - 1) if across else ranks.world_size - 1)
    if spec.startswith("hosts"):
        assert sent == pytest.approx(ranks.per_host * dry_run(compressor(spec), layout).sent_bytes, rel=0.01)
    return sent


def ratio_in(text):
    return float(text.rpartition(" sends ")[2].partition("x ")[0])


SENT_TO_ALL = [
    "int8",
    "int4",
    "int2",
    "int4:block=32,error_feedback=false",
    "onebit",
    "int4:core=4",
    "adaptive",
    "topk",
]
SENT_TO_ALL += ["powersgd:payload=int4", "powersgd:payload=int8", "bf16:sum=float32"]


@pytest.mark.parametrize("spec", SENT_TO_ALL)
@pytest.mark.parametrize("ranks", [HOSTS, Ranks(4, per_host=2), Ranks(12, per_host=4)])
def test_ranks_that_share_a_host_are_told_what_a_sum_inside_it_spares(spec, ranks):
    (text,) = told(spec, ranks=ranks)
    assert f"hosts+{spec} " in text
    hosts = f"hosts:ranks={ranks.per_host}+{spec}"
    assert ratio_in(text) == pytest.approx(through_card(spec, ranks) / through_card(hosts, ranks), rel=0.03)


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("int4", Ranks(16)),
        ("int4", Ranks(16, per_host=16)),
        ("hosts+int4", HOSTS),
        ("powersgd", HOSTS),
        ("bf16", HOSTS),
        ("none", HOSTS),
        ("acp-powersgd", HOSTS),
    ],
)
def test_nothing_is_said_of_hosts_where_there_is_one_rank_each_or_one_host_or_sums_alone(spec, ranks):
    assert told(spec, ranks=ranks) == []


@pytest.mark.parametrize(
    ("spec", "dtype"), [("bf16", BFLOAT16), ("fp16", FLOAT16), ("bf16", FLOAT16), ("fp16", BFLOAT16)]
)
def test_16_bits_are_not_made_fewer_by_16_bits(spec, dtype):
    (text,) = told(spec, dtype)
    assert f"gradients are {str(dtype)[6:]} already, so {spec} sends as many bytes as none" in text


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("bf16", FLOAT32), ("int8", BFLOAT16), ("bf16+powersgd", BFLOAT16), ("bf16:sum=float32", BFLOAT16)],
)
def test_nothing_is_said_of_16_bits_where_they_help(spec, dtype):
    assert told(spec, dtype, Ranks(2)) == []


class Unread:
    """A plug-in whose program must not run, and which cannot be compared."""

    def __eq__(self, other):
        raise ArithmeticError("on purpose")

    def init(self, layout):
        raise ArithmeticError("on purpose")

    reduce = init


def test_a_plug_in_is_neither_run_nor_compared():
    assert list(sent_in_vain(Unread(), BFLOAT16, HOSTS)) == []
