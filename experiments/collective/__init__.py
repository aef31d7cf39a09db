"""`gradwire collective`: how fast collectives are, by size and backend."""
