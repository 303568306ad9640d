"""Models from their files: formats, configs, tokenizers and chat templates, and the one decoder that runs them all."""
