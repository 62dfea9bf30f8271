"""Load for OpenAI-compatible servers, this one or others, and what they make of it."""
