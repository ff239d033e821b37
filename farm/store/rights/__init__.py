"""Who may do what in a store on PostgreSQL: the SQL for it, and whether it is there."""
