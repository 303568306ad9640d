"""GGUF files, the format of llama.cpp: one file with metadata, a tokenizer and tensors in many kinds of codes."""
