"""Virtual devices: an adb daemon in front of this machine, so that the simulator is reached as a phone is."""
