"""What a user's machine does: hand in a run, follow it, cancel it. Nothing of it runs on a device."""
