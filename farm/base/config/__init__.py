"""farm.toml, the environment and flags -> one frozen object."""
