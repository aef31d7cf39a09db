"""The state of a bucket: tensors, counters, shares, agreed values."""
