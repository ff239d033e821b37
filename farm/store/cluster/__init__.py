"""Rows of a shared farm: orders, shards, builds, agents and quotas. PostgreSQL only."""
