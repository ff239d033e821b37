"""Version of the rows that hosts exchange."""

PROTOCOL = 4
"""Version of orders, shards and agents: agents refuse agents of another protocol, and run no orders of it."""
