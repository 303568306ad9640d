"""A draft model that was distilled from its target and ships as a head: it reads tokens alone."""
