"""Job -> bundle, in compiler processes: the only package that imports torch and executorch."""
