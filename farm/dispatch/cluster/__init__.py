"""Shared farm of many hosts: submission of runs, their division, the agents, and following a run."""
