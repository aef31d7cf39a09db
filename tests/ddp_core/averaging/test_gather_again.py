"""Weights in use are read again behind the gather that wrote them, whatever stream waited for that one."""

from types import SimpleNamespace

import torch

from gradwire.ddp_core.averaging.shard_averager import ShardAverager


def test_rows_are_read_behind_the_gathers_that_write_them():
    rows, out = torch.zeros(2, 3), torch.empty(6)
    engine = SimpleNamespace(follow_gathers=lambda: rows.fill_(1.0))  # what waiting brings
    averager = SimpleNamespace(
        device=rows.device, engines=SimpleNamespace(of=lambda device, index: engine), _note=lambda *_, **__: None
    )
    ShardAverager.gather_again(averager, ("weight",), rows, out)
    assert out.tolist() == [1.0] * 6
