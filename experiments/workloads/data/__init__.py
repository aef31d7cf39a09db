"""The data that the drivers train on: on the machine already, never downloaded."""

from .dataset import Dataset
from .load import DataConfig, data_names, data_shape, load_dataset

__all__ = ["DataConfig", "Dataset", "data_names", "data_shape", "load_dataset"]
