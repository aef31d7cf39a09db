"""What other code expects of torch's DistributedDataParallel: attributes, arguments, logger, join."""
