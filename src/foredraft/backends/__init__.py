"""The arithmetic of a model as verbs, and who computes them: C kernels, Triton kernels, or plain torch."""
