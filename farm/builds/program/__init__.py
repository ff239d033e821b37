"""What a .pte file says of itself, read without torch."""
