"""What a report says, as lines of a terminal: pure."""
