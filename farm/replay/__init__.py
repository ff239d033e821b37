"""Programs run again: a ready .pte, a stored result, a job layer by layer."""
