"""What `foredraft simulate` runs: the engine's own step without a model, on a clock that is a number."""
