"""Several ranks of NCCL on one GPU: `make gpu PART=shared`; with --cpu the same over Gloo, which tries the checks."""
