"""The HTTP server: OpenAI's interface, metrics, and a view of the pool. Needs the extra `server`."""
