"""`farm serve`: the store as pages over HTTP, read only, and who may look at them."""
