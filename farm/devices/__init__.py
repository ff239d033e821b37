"""How a device is reached: the transport seam, the adb server and what is attached to it."""
