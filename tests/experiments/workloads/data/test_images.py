import pickle
import struct

import numpy as np
import pytest
import torch

from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig


def loaded(name, path=None):
    return load_dataset(DataConfig(name, None if path is None else str(path)), ModelConfig("mlp"))


def test_no_digit_to_train_on_is_held_out():
    digits = loaded("digits")
    train, held_out = (
        {image.numpy().tobytes() for image in part.tensors[0]} for part in (digits.train, digits.held_out)
    )
    assert not train & held_out


def write_idx(file, array):
    file.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture
def mnist_folder(tmp_path):
    """MNIST as torchvision keeps it, of twelve and four images."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 4)):
        write_idx(raw / f"{part}-images-idx3-ubyte", np.full((count, 28, 28), 255, np.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    return tmp_path / "data"


@pytest.fixture
def cifar_folder(tmp_path, monkeypatch):
    """CIFAR-10 as torchvision keeps it, of four images a file; its checksums cannot hold."""
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *arguments: True)
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.zeros((4, 3, 32, 32), np.uint8)
    pixels[:, 0] = 255  # red
    for name in (*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": pixels.reshape(4, -1), "labels": [0, 1, 2, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return tmp_path / "data"


def test_mnist_is_read_from_torchvision_s_folder(mnist_folder):
    pytest.importorskip("torchvision")
    dataset = loaded("mnist", mnist_folder)
    assert (len(dataset.train), len(dataset.held_out)) == (12, 4)
    assert dataset.input_shape == (1, 28, 28)
    image, label = dataset.train[11]
    assert (image == 1).all()
    assert (label.item(), label.dtype) == (1, torch.int64)


def test_cifar_10_is_read_from_torchvision_s_folder(cifar_folder):
    dataset = loaded("cifar10", cifar_folder)
    assert (len(dataset.train), len(dataset.held_out)) == (20, 4)
    assert dataset.input_shape == (3, 32, 32)
    image, label = dataset.train[3]
    assert (image[0] == 1).all()
    assert (image[1:] == -1).all()
    assert (label.item(), label.dtype) == (9, torch.int64)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_images_of_the_user_s_are_never_downloaded(name, tmp_path):
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match=r"name it with --data\.path; nothing is downloaded"):
        loaded(name)
    with pytest.raises(ValueError, match=f"{tmp_path} does not hold torchvision's"):
        loaded(name, tmp_path)
    assert not list(tmp_path.iterdir())
