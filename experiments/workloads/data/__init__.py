"""The data that the drivers train on: on the machine already, never downloaded."""

from .dataset import Batch, Dataset, Shape
from .load import DataConfig, data_names, data_shape, load_dataset

__all__ = ["Batch", "DataConfig", "Dataset", "Shape", "data_names", "data_shape", "load_dataset"]
