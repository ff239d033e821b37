"""One bundle on one device, from the lease to the recorded attempt: `DeviceRun`, which all commands use."""
