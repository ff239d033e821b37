"""One dispatcher for the devices of a host: job sources, device runners, device processes, the policy beside them."""
