"""When to draft and how much: plain Python over measured times."""
