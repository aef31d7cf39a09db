"""`gradwire advise`: whether to compress on these hosts, and how."""
