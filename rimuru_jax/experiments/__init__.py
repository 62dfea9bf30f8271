"""Studies of the engine: what it would do on any card, and what each of its parts is worth."""
