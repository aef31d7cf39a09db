"""The benchmark of DistributedDataParallel, and the difference between two of its files."""
