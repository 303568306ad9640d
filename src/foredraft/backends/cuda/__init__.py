"""The GPU backend: Triton kernels, plans in one upload, captured graphs."""
