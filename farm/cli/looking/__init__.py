"""Commands that look at what the store has: status, history, reports, exports."""
