"""The only callers of collectives: a process group, memory that ranks of one host share."""
