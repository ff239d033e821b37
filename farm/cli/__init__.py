"""The command line: a module or more for each command, imported only when it is called."""
