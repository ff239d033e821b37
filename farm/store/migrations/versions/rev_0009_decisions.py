"""Kind of a run and of its devices, and the decisive attempt of a job, stored when they are recorded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the columns, and fill them for existing runs."""
    op.add_column("run", Column("run_kind", sa.String(length=16), nullable=False, server_default="suite"))
    op.add_column("run", Column("run_device_kind", sa.String(length=16), nullable=True))
    op.add_column("run_job", Column("decisive_attempt_id", sa.BigInteger(), nullable=True))
    op.add_column("run_job", Column("decisive_verdict", sa.String(length=16), nullable=True))

    fingerprint = sa.table("fingerprint", sa.column("hash"), sa.column("facts", sa.JSON()))
    run = sa.table("run", *map(sa.column, ("command", "fingerprint_hash", "run_kind", "run_device_kind")))

    def fact(name: str) -> sa.ColumnElement[str]:
        of_run = fingerprint.c.hash == run.c.fingerprint_hash
        value: sa.ColumnElement[str] = fingerprint.c.facts[name].as_string()
        return sa.select(value).where(of_run).scalar_subquery()

    kind = sa.case(
        (fact("debug").is_not(None), "debug"),
        (run.c.command.like("farm exec%"), "exec"),
        (run.c.command.like("farm repro%"), "repro"),
        (run.c.command.like("farm pytest%"), "tests"),
        else_="suite",
    )
    device_kind = sa.func.substr(fact("device_kind"), 1, 16)
    op.execute(sa.update(run).values(run_kind=kind, run_device_kind=device_kind))
    # A later infra attempt does not replace a verdict about the code.
    op.execute("""
        UPDATE run_job SET (decisive_attempt_id, decisive_verdict) = (
            SELECT id, verdict FROM attempt WHERE attempt.run_job_id = run_job.id
            ORDER BY CASE WHEN verdict = 'infra' THEN 1 ELSE 0 END, id DESC LIMIT 1
        )
    """)
    # Triggers, as a running farm of an older revision may still record attempts.
    decide = """
        UPDATE run_job SET decisive_attempt_id = NEW.id, decisive_verdict = NEW.verdict
        WHERE id = NEW.run_job_id
        AND (decisive_verdict IS NULL OR decisive_verdict = 'infra' OR NEW.verdict <> 'infra');
    """
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"CREATE TRIGGER attempt_decides AFTER INSERT ON attempt BEGIN {decide} END")
        return
    op.execute(f"""
        CREATE FUNCTION attempt_decides() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {decide} RETURN NULL; END $$
    """)
    op.execute("CREATE TRIGGER attempt_decides AFTER INSERT ON attempt FOR EACH ROW EXECUTE FUNCTION attempt_decides()")
