import numpy as np
import pytest
import torch

from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig

CONTEXT = 16


def loaded(name="text", path=None, context=CONTEXT):
    return load_dataset(DataConfig(name, None if path is None else str(path)), ModelConfig("gpt", context=context))


def bytes_of(samples):
    """All bytes that the samples hold, each once."""
    inputs = b"".join(bytes(samples[index][0].tolist()) for index in range(len(samples)))
    return inputs + bytes(samples[len(samples) - 1][1][-1:].tolist())


def rows(batches, count):
    """The inputs of some batches, hashable."""
    return [
        tuple(row.flatten().tolist()) for _, (inputs, _) in zip(range(count), batches, strict=False) for row in inputs
    ]


@pytest.fixture
def folder(tmp_path):
    """Twenty files, each full of a byte of its own."""
    root = tmp_path / "texts"
    root.mkdir()
    for index in range(20):
        (root / f"{index:02}.txt").write_bytes(bytes([index]) * 100)
    return root


@pytest.fixture
def numbered(tmp_path):
    """A file in which no two stretches of a context are alike."""
    file = tmp_path / "numbered.txt"
    file.write_bytes(b"".join(f"{index:07}\n".encode() for index in range(400)))
    return loaded(path=file)


def test_text_is_split_by_file_one_in_ten(folder):
    dataset = loaded(path=folder)
    assert set(bytes_of(dataset.held_out)) == {9, 19}
    assert set(bytes_of(dataset.train)) == set(range(20)) - {9, 19}


def test_a_single_file_holds_out_its_last_tenth(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(250)) * 4)
    dataset = loaded(path=file)
    content = file.read_bytes()
    assert content.startswith(bytes_of(dataset.train))
    assert content[900:].startswith(bytes_of(dataset.held_out))
    assert len(bytes_of(dataset.train)) <= 900


def test_no_sample_to_train_on_is_held_out(numbered):
    train = {tuple(sample[0].tolist()) for sample in numbered.train}
    held_out = {tuple(sample[0].tolist()) for sample in numbered.held_out}
    assert len(train) == len(numbered.train)
    assert not train & held_out


def test_a_sample_s_targets_are_the_tokens_that_follow(numbered):
    inputs, targets = numbered.train[3]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (CONTEXT,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert targets[-1] == numbered.train[4][0][0]


def test_text_of_packages_is_split_by_file_and_no_validation_text_is_trained_on(tmp_path):
    for index in range(200):
        folder = tmp_path / f"package{index % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index}.py").write_bytes(f"text of file {index:07}\n".encode() * 2)
        (folder / f"copy{index}.txt").write_bytes(f"text of file {index:07}\n".encode() * 2)
        (folder / f"{index}.so").write_bytes(b"\xff" * 100)
    dataset = loaded("packages", tmp_path)
    parts = [set(bytes(each.tokens.tolist()).split(b"\0")) for each in (dataset.train, dataset.held_out)]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 200
    assert 5 <= len(parts[1]) <= 40  # of 400 files one in 20, of 200 texts with two files each about one in 10
    assert f"{len(dataset.train.tokens)} bytes of {len(parts[0])} files" in dataset.source


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_order_of_samples_depends_on_the_seed_alone(name, numbered):
    dataset = numbered if name == "text" else loaded("digits")

    def order(seed):
        return rows(dataset.train_batches(4, seed=seed, rank=0, world_size=2), 5)

    assert order(0) == order(0)
    assert order(0) != order(1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_never_share_a_sample_within_an_epoch(numbered, world_size):
    each = len(numbered.train) // world_size // 4
    seen = [
        rows(numbered.train_batches(4, seed=0, rank=rank, world_size=world_size), each) for rank in range(world_size)
    ]
    together = [row for rank in seen for row in rank]
    assert len(together) == world_size * each * 4
    assert len(set(together)) == len(together)


def test_held_out_batches_are_spread_evenly_and_the_same_at_every_call():
    digits = loaded("digits")
    first, second = (rows(digits.evaluation_batches(4, 5), 100) for _ in range(2))
    assert first == second
    assert len(first) == 20
    labels = torch.cat([labels for _, labels in digits.evaluation_batches(4, 5)])
    assert torch.equal(labels, torch.stack([digits.held_out[index * 360 // 20][1] for index in range(20)]))


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_user_s_random_state_is_not_touched(name, numbered):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    dataset = numbered if name == "text" else loaded("digits")
    rows(dataset.train_batches(4, seed=0, rank=0, world_size=1), 3)
    rows(dataset.evaluation_batches(4, 3), 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
