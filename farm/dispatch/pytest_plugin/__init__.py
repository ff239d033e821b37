"""`farm pytest`: the user's own pytest, with one worker a device."""
