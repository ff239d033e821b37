"""Virtual devices: an adb daemon in front of the simulator, with faults on request."""
