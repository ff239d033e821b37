"""Tables of farm 0.2.0, the oldest store that is upgraded; new stores are made from `farm.store.schema`."""

revision = "0015"
down_revision = None
