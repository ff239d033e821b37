"""Texts and multiple choice tasks whose log-likelihoods are measured: what they are as token ids. Torch-free."""
