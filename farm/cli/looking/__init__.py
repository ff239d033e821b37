"""Commands that read the store: status, history, reports, exports."""
