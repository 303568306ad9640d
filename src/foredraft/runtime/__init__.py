"""What engine and proposers share: the KV cache and the runner of a model."""
