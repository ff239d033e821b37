"""Backend and SoC -> Runtime: the runner and the libraries a device needs, built or found, signed and checked."""
