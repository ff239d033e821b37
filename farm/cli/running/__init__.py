"""Commands that run something on a device."""
