"""MTP: the layer for multi-token prediction that some models bring along in their own files."""
