from functools import partial

from gradwire.experiments.kernels.race import ASSUMED_CACHE, Racer, last_level_cache, race


class Steps:
    """A clock that takes each work's word for its seconds, and writes down who ran."""

    cache_bytes = 0

    def __init__(self):
        self.ran = []

    def seconds(self, work):
        name, seconds = work()
        self.ran.append(name)
        return seconds


def test_racers_take_turns_and_the_slow_do_not_keep_the_fast_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gradwire.experiments.kernels.race.time.monotonic", lambda: now[0])

    def work(name, seconds):
        now[0] += seconds
        return name, seconds

    clock = Steps()
    speeds = {"slow": 1.0, "fast": 0.1}
    racers = {name: Racer(partial(work, name, each), ("reference",)) for name, each in speeds.items()}
    timings = race(racers, clock, repeats=7, seconds=0.45)
    assert {name: each.repeats for name, each in timings.items()} == {"slow": 3, "fast": 5}
    assert clock.ran == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "fast"]
    assert timings["slow"].median == 1.0


def test_the_last_level_cache_is_counted_once_for_the_processors_that_share_it(tmp_path):
    for cpu in range(4):
        for level, size in ((1, 32), (2, 512), (3, 32768)):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            shared = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if level == 3 else str(cpu)
            for name, text in (("level", level), ("size", f"{size}K"), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert last_level_cache(tmp_path) == 2 * 32768 * 1024
    assert last_level_cache(tmp_path / "none") == ASSUMED_CACHE
