"""Job -> bundle, in processes of their own: the only room that imports torch and executorch."""
