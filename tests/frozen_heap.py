"""The last module that the process of `forked_command` imports: forks share objects until they write to them."""

import gc

gc.collect()
gc.freeze()
