from gradwire.experiments.kernels import clocks
from gradwire.experiments.kernels.clocks import last_level_cache


def test_the_last_level_cache_is_counted_once_for_the_processors_that_share_it(tmp_path):
    for cpu in range(4):
        for level, size in ((1, 32), (2, 512), (3, 32768)):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            shared = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if level == 3 else str(cpu)
            for name, text in (("level", level), ("size", f"{size}K"), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert last_level_cache(tmp_path) == 2 * 32768 * 1024
    assert last_level_cache(tmp_path / "none") == clocks.ASSUMED_CACHE
