"""HTTP: the OpenAI routes in one process, the engine in another."""
