"""Policy of a farm, in pure functions: which waiter gets which device, and why another one waits."""
