"""Command line: a module for each command or a few of one subject, imported only when a command is called."""
