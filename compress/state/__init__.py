"""What compressors remember of a bucket: state tensors, counters, shares, agreed values."""
