"""gradwire on collectives that a training loop calls by itself."""
