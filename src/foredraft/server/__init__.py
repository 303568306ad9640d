"""`foredraft serve`: the engine behind HTTP, in the shapes that clients of OpenAI and Anthropic speak."""
