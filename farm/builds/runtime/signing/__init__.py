"""`farm sign`: from an unsigned file to a signed one. Whether a signature holds: `farm.builds.runtime.sign_record`."""
