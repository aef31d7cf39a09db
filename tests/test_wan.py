"""A line in user space: when bytes have left, when they arrive, and what a cut does."""

import asyncio

import pytest

from .wan import Direction, Wan


def test_bytes_of_all_connections_share_a_direction_s_rate():
    line = Direction(1000.0, delay=0.5)
    assert line.leaves(1000, 10.0) == (11.0, 11.5)
    assert line.leaves(500, 10.2) == (11.5, 12.0)  # behind the first
    assert line.leaves(500, 20.0) == (20.5, 21.0)


def test_jitter_and_loss_make_bytes_late_and_are_the_same_with_the_same_seed():
    def arrivals(seed, **options):
        line = Direction(1e9, delay=0.1, seed=seed, **options)
        return [line.leaves(1460, 0.0)[1] for _ in range(200)]

    assert all(0.1 <= each < 0.11 + 1e-3 for each in arrivals(0, jitter=0.01))
    late = sum(each > 0.25 for each in arrivals(0, loss=0.1))
    assert 5 < late < 40
    assert arrivals(1, loss=0.1, jitter=0.01) == arrivals(1, loss=0.1, jitter=0.01)
    assert arrivals(1, jitter=0.01) != arrivals(2, jitter=0.01)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": 1, "delay": -1}, {"rate": 1, "loss": 1}])
def test_a_line_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="a line has a rate above 0"):
        Direction(**wrong)


def test_a_cut_holds_one_direction_back_and_the_end_of_bytes_passes():
    async def run():
        async def echo(reader, writer):
            writer.write(await reader.read(-1))
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        line = Wan("127.0.0.1", server.sockets[0].getsockname()[1], Direction(1e8), Direction(1e8, cut=True))
        reader, writer = await asyncio.open_connection("127.0.0.1", await line.open())
        writer.write(b"x" * 50000)
        writer.write_eof()
        while line.up.passed < 50000:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(reader.read(-1))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        assert line.down.passed == 0
        line.down.cut = False
        assert await asyncio.wait_for(waiting, 30) == b"x" * 50000
        await line.close()
        server.close()

    asyncio.run(run())
