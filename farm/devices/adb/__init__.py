"""The transport over adb, its server and its protocols."""
