"""Collectives in which each block crosses the network once, straight to who needs it."""
