"""The engine: which sequences run in a step, with which drafts, and what becomes of them."""
