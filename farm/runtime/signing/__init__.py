"""`farm sign`: from an unsigned file to a signed one. Whether a signature holds: `farm.runtime.sign_record`."""
