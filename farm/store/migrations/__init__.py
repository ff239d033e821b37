"""Alembic revisions of the store, inside the package: no ini file is needed to run them."""
