"""Version of the rows that hosts exchange."""

PROTOCOL = 3
"""Version of orders, shards and agents: agents refuse agents of another protocol, and run no orders of it."""
