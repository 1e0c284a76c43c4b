"""Load on a server with an OpenAI-compatible API, and what its clients see: times, throughput, errors."""
