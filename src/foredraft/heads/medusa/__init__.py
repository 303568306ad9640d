"""Medusa: one small network per offset, on the last hidden state of the target; a draft is one run."""
