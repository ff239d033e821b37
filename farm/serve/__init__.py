"""`farm serve`: the store as read-only pages over HTTP, and access control."""
