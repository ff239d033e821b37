"""Runs out of a store and into another, as lines of JSON that nobody trusts."""
