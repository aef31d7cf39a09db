"""A line in user space: when bytes have left, and when they arrive."""

import asyncio
import time

from .wan import Direction, Wan


def test_bytes_of_all_connections_share_a_direction_s_rate():
    line = Direction(1000.0, delay=0.5)
    assert line.leaves(1000, 10.0) == (11.0, 11.5)
    assert line.leaves(500, 10.2) == (11.5, 12.0)  # behind the first
    assert line.leaves(500, 20.0) == (20.5, 21.0)


def test_bytes_and_their_end_pass_a_line_after_its_delays():
    async def run():
        async def echo(reader, writer):
            writer.write(await reader.read(-1))
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        line = Wan("127.0.0.1", server.sockets[0].getsockname()[1], Direction(1e8, 0.1), Direction(1e8, 0.2))
        reader, writer = await asyncio.open_connection("127.0.0.1", await line.open())
        began = time.monotonic()
        writer.write(b"x" * 50000)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), 30) == b"x" * 50000
        assert time.monotonic() - began > 0.3
        await line.close()
        server.close()

    asyncio.run(run())
