"""Jobs brought to devices: dispatcher, job sources, device processes, result log, and the commands that use them."""
