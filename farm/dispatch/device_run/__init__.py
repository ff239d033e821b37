"""Execution of a bundle on a device, from the lease to the recorded attempt: `DeviceRun`, used by all commands."""
