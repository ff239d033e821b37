"""`farm setup sign`: unsigned files become signed ones; `builds.runtime.sign_record` verifies them."""
