"""The user's own pytest on farm devices: what `farm pytest` starts, and the plugin that it loads there."""
