"""Job -> a program that writes every layer, and the same layers on the CPU: the compiler of `farm debug`."""
