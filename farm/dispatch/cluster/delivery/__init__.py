"""Messages of a shared farm: Procrastinate brings them to agents, which then look into the store for what to do."""
