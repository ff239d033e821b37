"""What differs from one backend to the next: a descriptor each, and the registry."""
