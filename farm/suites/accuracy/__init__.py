"""Texts and multiple choice tasks as token ids, for measured log-likelihoods. Torch-free."""
