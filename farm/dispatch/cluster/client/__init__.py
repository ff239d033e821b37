"""Part of a user's machine in a shared farm: submitting, following and cancelling a run. It uses no device."""
