"""Rows of a large farm by the hundred thousand, made from few that calls of the farm have written: filled_farm.py."""

from __future__ import annotations

from sqlalchemy import Connection, Table, text

from farm.store import schema

_NUMBERED = """
    CREATE TEMP TABLE copied AS
    SELECT nextval(pg_get_serial_sequence('shard', 'id')) AS new_id, shard.id AS old_id, n
    FROM shard JOIN run_order USING (run_id), generate_series(1, :times) AS n WHERE priority = 0
"""
_DEVICES = """
    CREATE TEMP TABLE busy AS
    SELECT device, soc, agent, token, row_number() OVER (PARTITION BY soc ORDER BY device) AS n
    FROM agent_device JOIN agent ON agent.name = agent_device.agent WHERE NOT device = ANY(:idle)
"""
# Every run has some: the shards of a SoC take turns by their numbers.
_HELD = """
    CREATE TEMP TABLE taken AS
    SELECT busy.*, shard.id, run_order.user_name, run_order.priority
    FROM busy JOIN (
        SELECT id, soc, run_id, row_number() OVER (PARTITION BY soc ORDER BY hashint8(id)) AS n FROM shard
        WHERE state = 'waiting' AND lacking = 0
    ) AS shard USING (soc, n) JOIN run_order USING (run_id)
"""
_HOLD = """
    UPDATE shard SET state = 'held', device = taken.device, agent = taken.agent, token = taken.token, fence = 1,
                     held_ms = 1 FROM taken WHERE shard.id = taken.id
"""
_LEASE = """
    UPDATE lease SET fence = 1, token = taken.token, user_name = taken.user_name, priority = taken.priority,
                     host = 'bench', purpose = 'farm run', expires_ms = 4102444800000
    FROM taken WHERE lease.device = taken.device
"""


def multiply_shards(connection: Connection, times: int) -> None:
    """Add `times` copies of every shard of a nightly run."""
    connection.execute(text(_NUMBERED), {"times": times})
    _copy(connection, schema.shard, {"id": "new_id", "position": "position + n * 1000000"}, "id")
    _copy(connection, schema.shard_jobs, {"shard": "new_id"}, "shard")
    connection.execute(text("DROP TABLE copied"))


def hold_devices(connection: Connection, idle: list[str]) -> None:
    """Let every device except `idle` run a shard."""
    # Nothing is known of rows that this transaction has written, and 10,000 devices meet 300,000 shards.
    connection.execute(text("ANALYZE"))
    connection.execute(text("SET LOCAL enable_nestloop = off"))
    for statement in (_DEVICES, _HELD, _HOLD, _LEASE, "DROP TABLE busy, taken"):
        connection.execute(text(statement), {"idle": idle} if ":idle" in statement else {})


def add_history(connection: Connection, attempts: int) -> None:
    """Add earlier nightly runs with `attempts` in all: jobs of the largest run, each like its newest attempt."""
    connection.execute(text("SET LOCAL session_replication_role = replica"))
    query = "SELECT run_id, count(*) AS n FROM run_job GROUP BY run_id ORDER BY n DESC LIMIT 1"
    largest = connection.execute(text(query)).one()
    times = {"run": largest.run_id, "times": -(-attempts // largest.n)}
    series = "generate_series(1, :times) AS n"
    for table, of_run in ((schema.run, "id"), (schema.run_job, "run_id")):
        names = [column.name for column in table.columns if table is schema.run or column.name != "id"]
        chosen = [f"{name} || '-' || n" if name == of_run else name for name in names]
        copies = f"SELECT {', '.join(chosen)} FROM {table.name}, {series} WHERE {of_run} = :run"  # noqa: S608 - names of columns
        connection.execute(text(f"INSERT INTO {table.name} ({', '.join(names)}) {copies}"), times)
    names = [column.name for column in schema.attempt.columns if column.name != "id"]
    chosen = ["run_job.id" if name == "run_job_id" else f"attempt.{name}" for name in names]
    connection.execute(
        text(
            f"INSERT INTO attempt ({', '.join(names)}) SELECT {', '.join(chosen)} FROM run_job, "  # noqa: S608 - names of columns
            "(SELECT * FROM attempt ORDER BY id DESC LIMIT 1) AS attempt WHERE run_id LIKE :past"
        ),
        {"past": f"{largest.run_id}-%"},
    )


def _copy(connection: Connection, table: Table, changed: dict[str, str], key: str) -> None:
    names = [column.name for column in table.columns]
    chosen = [changed.get(name, name) for name in names]
    copied = f"SELECT {', '.join(chosen)} FROM {table.name} JOIN copied ON copied.old_id = {table.name}.{key}"  # noqa: S608 - names of columns
    connection.execute(text(f"INSERT INTO {table.name} ({', '.join(names)}) {copied}"))
