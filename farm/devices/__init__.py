"""Devices by adb, SSH or as this machine: identity, health, recovery, sessions, virtual devices."""
