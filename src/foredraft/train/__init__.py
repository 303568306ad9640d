"""What `foredraft train` does: text that the target writes, features, losses, the loop, and how far a head got."""
