"""How a device is reached, by adb, SSH or as this machine; who and how it is; how it is brought back."""
