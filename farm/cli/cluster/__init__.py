"""Commands of a shared farm: agents, the queue, quotas, and runs that agents execute."""
