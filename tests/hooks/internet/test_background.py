"""A loop on a thread of its own ends what it runs, and starts nothing after that."""

import asyncio
import threading

import pytest

from gradwire.hooks.internet.background import Background, Closed

from ..local_sgd.sites import EVENT


def test_what_starts_while_a_loop_closes_raises_and_does_not_hang():
    background, cancelled, go_on = Background(), threading.Event(), threading.Event()

    async def stubborn():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
            await asyncio.to_thread(go_on.wait, EVENT)

    waiting = background.start(stubborn())
    closing = threading.Thread(target=background.close)
    closing.start()
    assert cancelled.wait(EVENT)
    try:
        with pytest.raises(Closed):
            background.start(asyncio.sleep(60))
    finally:
        go_on.set()
        closing.join(EVENT)
    background.close()  # once more changes nothing
    assert waiting.cancelled()
    with pytest.raises(Closed):
        background.run(asyncio.sleep(60), EVENT)
