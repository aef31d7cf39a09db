"""The data that the drivers train on: on the machine already, never downloaded."""

from .dataset import Batch, Dataset
from .load import DataConfig, data_names, load_dataset

__all__ = ["Batch", "DataConfig", "Dataset", "data_names", "load_dataset"]
