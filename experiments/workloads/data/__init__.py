"""The data that the drivers train on: on the host already, never downloaded."""

from .dataset import Dataset
from .load import DATA, DataConfig, data_shape, load_dataset

__all__ = ["DATA", "DataConfig", "Dataset", "data_shape", "load_dataset"]
