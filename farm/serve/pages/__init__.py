"""Pages of the server: one module per object. It imports none, so that a command imports only its own."""
