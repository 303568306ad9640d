"""From logits to tokens: the pipeline of a request, keyed noise, grammars, and the acceptance rules."""
