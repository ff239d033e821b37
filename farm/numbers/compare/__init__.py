"""Two sides of a question, compiled and run in turns: toolchain against toolchain, SDK against SDK, options."""
