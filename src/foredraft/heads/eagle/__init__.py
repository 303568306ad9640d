"""EAGLE: a decoder layer over features of the target and the embedding of a token, run once per depth of a draft."""
