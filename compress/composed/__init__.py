"""Compressors that are made of others."""
