"""Messages of a shared farm: Procrastinate brings them to agents, which then read their work from the store."""
