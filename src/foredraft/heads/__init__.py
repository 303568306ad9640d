"""Trained heads, small networks that draft for one model: each kind is a folder, and what all share stands beside."""
