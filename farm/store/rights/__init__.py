"""Rights of groups in a store on PostgreSQL: their SQL, and the check for it."""
