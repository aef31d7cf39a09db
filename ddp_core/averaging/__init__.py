"""A bucket becomes its average: by a compressor's programs, or by a user's hook."""
