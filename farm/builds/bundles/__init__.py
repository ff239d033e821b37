"""What a job compiles to: a folder addressed by everything that went into it."""
