"""A farm of many hosts: what is submitted, divided, handed to agents and followed."""
