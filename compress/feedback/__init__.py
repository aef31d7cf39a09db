"""Wrappers around compressors: error feedback and its options, warm-up, groups of parameters."""
