"""Compressors, one per file, and the arithmetic that several of them share."""
