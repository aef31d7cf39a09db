"""Build a compressor from a text such as "powersgd:rank=4"."""
