"""What `foredraft audit` checks on a machine: the same text, the sampled distribution, and rows that are independent."""
