"""Commands of a shared farm: agents, the queue, and runs that go on without whoever handed them in."""
