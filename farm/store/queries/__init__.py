"""What is read of the store, grouped; the statements by name are in `store/sql`."""
