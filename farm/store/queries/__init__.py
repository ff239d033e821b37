"""Readers of the store by subject; `store/sql` has the named statements."""
