"""Folders with a config.json and safetensors files, as transformers writes them."""
