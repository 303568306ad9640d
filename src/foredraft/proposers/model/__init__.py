"""The machinery of drafting with a model, be it a whole one or a head: trees that grow level by level."""
