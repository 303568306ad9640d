"""Random heads in the layouts of their publishers, and what each of them computes, in plain PyTorch.

Nothing here imports the package under test: the references follow the publishers' own model files.
"""
