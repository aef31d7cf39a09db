"""Temporary tensors share blocks of memory one after the other, never at the same time."""

import gc
import threading

import torch

from gradwire.kernels.memory_pool import Pool, pool, temporary

MIB = 1 << 20
CPU = torch.device("cpu")


def test_a_block_is_used_again_once_its_tensor_and_all_views_are_gone():
    mine = Pool()
    first = mine.tensor((4, MIB), torch.uint8)
    address, view = first.data_ptr(), first[2:]
    del first
    second = mine.tensor((4 * MIB,), torch.uint8)
    assert second.data_ptr() != address
    del view
    assert mine.tensor((MIB,), torch.float32).data_ptr() == address


def test_blocks_never_exceed_the_most_that_was_in_use_at_once():
    mine = Pool()
    for size in (1, 3, 9, 27, 5):
        tensor = mine.tensor((size * MIB,), torch.uint8)
        del tensor
    mine.tensor((MIB,), torch.uint8)
    assert mine.free_bytes <= 27 * MIB
    mine.release()
    assert mine.free_bytes == 0


def test_a_tensor_in_a_larger_block_counts_with_the_whole_block():
    mine = Pool()
    for size in (8, 5, 8, 5):
        mine.tensor((size * MIB,), torch.uint8)
    small = mine.tensor((3 * MIB,), torch.uint8)
    assert (small.nbytes, mine.free_bytes) == (3 * MIB, 0)  # with the block of 8 MiB it would be more than ever in use


def test_a_block_more_than_twice_too_large_is_left_for_others():
    mine = Pool()
    large = mine.tensor((9 * MIB,), torch.uint8)
    address = large.data_ptr()
    del large
    small = mine.tensor((MIB,), torch.uint8)
    assert small.data_ptr() != address


def test_small_ones_are_torchs():
    before = pool._lent
    made = temporary((8,), dtype=torch.float32, device=CPU)
    assert made.shape == (8,)
    assert pool._lent == before


def test_threads_share_no_block():
    mine, wrong = Pool(), []

    def work(number):
        for _ in range(50):
            tensor = mine.tensor((MIB,), torch.uint8).fill_(number)
            if int(tensor[::4096].sum()) != number * len(tensor[::4096]):
                wrong.append(number)
            del tensor
            gc.collect(0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
