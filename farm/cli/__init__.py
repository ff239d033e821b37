"""Command line: a module or more for each command, imported only when the command is called."""
