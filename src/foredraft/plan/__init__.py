"""`foredraft plan`: whether speculation pays, and what follows from figures, a benchmark or a running server."""
