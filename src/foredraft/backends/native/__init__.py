"""The CPU backend in C, over the kernels in `kernels/`."""
