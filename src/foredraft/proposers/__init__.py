"""Who drafts: one file per proposer, the string that chooses among them, and the merging of their drafts."""
