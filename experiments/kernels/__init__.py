"""`gradwire kernels`: how fast each operation is on each backend, against memory and against torch's operators."""
