"""The heads as modules for training. Their tensors have the names and shapes of models/heads/shapes.py."""
