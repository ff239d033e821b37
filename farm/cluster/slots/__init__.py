"""Slots: the processes of an agent that run jobs, one a device."""
