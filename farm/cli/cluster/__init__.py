"""Commands of a shared farm: agents, the queue, and runs that agents execute."""
