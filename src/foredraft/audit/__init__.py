"""What `foredraft audit` checks on a machine: the same text, the sampled distribution, and independent rows."""
