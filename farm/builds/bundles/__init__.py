"""Bundles: results of compiling jobs, each a folder addressed by the hash of all its ingredients."""
