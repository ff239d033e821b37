"""Messages that wake agents: Procrastinate's tables in the store, which only PostgreSQL has."""
