"""Foredraft inside other engines, and on clusters of them."""
