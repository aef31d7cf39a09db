"""The order in which gradients leave, alike on all ranks."""
