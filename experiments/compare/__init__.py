"""The same training with each compressor, side by side."""
