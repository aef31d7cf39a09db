"""Flat memory for gradients: assignment, copying, sparse rows."""
