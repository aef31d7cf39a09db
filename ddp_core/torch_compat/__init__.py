"""The parts of torch's DistributedDataParallel that other code expects: attributes, arguments, logger, join."""
