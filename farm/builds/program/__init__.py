"""Contents of `.pte` files, read without torch."""
