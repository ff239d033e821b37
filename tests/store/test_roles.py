"""Rights in a store with roles: each action tried, by logins of each group, on a real PostgreSQL."""

# ruff: noqa: S608 - names of tables come from the schema

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import pytest
from farm_home import FarmHome
from log_lines import LogLines
from msgspec.structs import replace
from postgresql_server import running_cluster
from shared_rows import TTL_S, agent, claim, facts, job, key, new_order, record, result, shards, submit, take_build
from waiting import until

from farm.base.errors import LeaseLostError, StoreError, UsageError
from farm.base.interrupts import INTERRUPTED
from farm.dispatch.cluster.delivery import finish
from farm.policy.situation import Lease, Priority
from farm.store.accounts import Role
from farm.store.cluster.records import Build, NewBuild
from farm.store.leases.registry import Seen
from farm.store.records import Remark, RunRecord
from farm.store.schema import metadata
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make

LOGINS = {
    "mia": "lab", "host1": "farm_agent", "host2": "farm_agent", "hostc": "farm_builder", "hostd": "farm_builder",
    "web": "farm_server", "vic": "farm_reader",
}  # fmt: skip

COLUMNS = {name: next(iter(table.c)).name for name, table in sorted(metadata.tables.items())}
"""A column of each table."""

LONG_S = 600.0
"""Lease duration that no slow machine outlasts."""


class Lab(NamedTuple):
    """A server, where `lab` owns the database of that name and the others are members of groups."""

    folder: str

    def address(self, user: str, database: str = "lab") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}"

    def sql(self, user: str, statement: str, *values: object, database: str = "lab") -> list[tuple[object, ...]]:
        """Execute a statement as a login, as psql would."""
        with psycopg.connect(f"host={self.folder} user={user} dbname={database}") as connection:
            done = connection.execute(statement, values or None)  # type: ignore[call-overload]
            return done.fetchall() if done.description else []

    def create_database(self, name: str) -> None:
        with psycopg.connect(f"host={self.folder} user=farm dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} OWNER lab".encode())


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_cluster() as folder:
        made = Lab(folder)
        made.sql("farm", "".join(f"CREATE ROLE {name} LOGIN;" for name in ("lab", *LOGINS)), database="postgres")
        made.create_database("lab")
        # Owner and rights of the schema in PostgreSQL 14, and in later versions upgraded from it.
        made.sql("farm", "ALTER SCHEMA public OWNER TO farm; GRANT ALL ON SCHEMA public TO PUBLIC")
        with open_store(made.address("lab")) as store:
            store.messages.require()
        with open_store(made.address("farm")) as store:
            store.roles.apply()
        made.sql("farm", "".join(f"GRANT {group} TO {name};" for name, group in LOGINS.items()))
        yield made


@pytest.fixture
def stores(lab: Lab) -> Iterator[dict[str, Store]]:
    """The store as each login has it."""
    with contextlib.ExitStack() as opened:
        yield {name: opened.enter_context(open_store(lab.address(name))) for name in (*LOGINS, "lab")}
        tables = "alert, triage, lease, waiter, agent_device, agent, quota, build, build_wanted, shard, shard_jobs"
        tables += ", run_order, device_state, health_event, shard_weights"
        lab.sql("lab", f"TRUNCATE {tables} CASCADE")


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect that the database refuses the body, with the reason."""
    with pytest.raises(Exception, match="|".join(words) or "permission denied|you signed in as") as caught:
        yield
    assert isinstance(caught.value, StoreError) or getattr(caught.value, "sqlstate", "") == "42501", caught.value


def refuse(lab: Lab, user: str, *statements: str, words: str = "permission denied|you signed in as") -> None:
    """Expect that the database refuses each statement of a login."""
    with psycopg.connect(f"host={lab.folder} user={user} dbname=lab", autocommit=True) as connection:
        for statement in statements:
            with refused(words):
                connection.execute(statement.encode())


def lease_of(store: Store, device: str, user: str) -> Lease:
    ask = {"count": 1, "user": user, "host": "desk", "pid": 1, "purpose": "farm shell", "ttl_s": 30.0}
    token = store.leases.request([device], priority=Priority.PERSON, **ask)  # type: ignore[arg-type]
    try:
        [lease] = store.leases.poll(token, ttl_s=30)
        return lease
    finally:
        store.leases.withdraw(token)


def test_every_table_is_read_by_every_group_of_agents_servers_and_readers(lab: Lab) -> None:
    query = """
        SELECT rolname, relname FROM pg_class, pg_roles
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND rolname LIKE 'farm\\_%'
          AND has_table_privilege(pg_roles.oid, pg_class.oid, 'SELECT')
    """
    granted = lab.sql("lab", query)
    for group in ("farm_agent", "farm_server", "farm_reader"):
        assert set(metadata.tables) <= {table for role, table in granted if role == group}, group


def test_names_are_those_of_logins(lab: Lab, stores: dict[str, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody")
    assert {name: store.user for name, store in stores.items()} == {name: name for name in LOGINS} | {"lab": "somebody"}
    with open_store(lab.address("vic"), readonly=True) as reader:
        assert reader.user == "vic"


def test_a_shared_run_from_the_server_to_its_end_by_an_agent(stores: dict[str, Store]) -> None:
    web, host = stores["web"], stores["host1"]
    builds = [NewBuild(key(n), "tools", job(n), {}) for n in range(2)]
    run_id = submit(web, shards(2), "ada", builds=builds)
    one = agent(host)
    worker = host.cluster.begin_worker()
    while made := host.cluster.take_build(worker, "h1", ["tools"]):
        host.cluster.keep_workers([worker], [made.task.key])
        host.cluster.record_build(made, Build(made.task.key, "built", "a" * 64, 5))
    host.cluster.end_worker(worker)
    host.cluster.heartbeat(one, None, TTL_S)
    for _ in range(2):
        [held] = claim(host, one)
        assert held.lease.user == "ada"
        assert record(host, one, held) == []
        host.cluster.release(one, [held.lease])
    host.cluster.recover(ttl_s=10)
    assert host.cluster.end_if_over(run_id)
    host.messages.retry(30)
    host.messages.remove_ended(1)
    host.finish_run(run_id, 0)
    host.alerts.record(run_id, [])
    host.cluster.leave(one)
    assert web.cluster.progress(run_id, 0).order.state == "ended"
    assert [str(each.attempts[0].verdict) for each in web.runs.view(run_id).jobs] == ["passed"] * 4
    # And again, some of it.
    web.cluster.submit(new_order(run_id), shards(1, first=0), jobs=[job(0), job(1)], again=True)
    assert web.cluster.cancel(run_id, "ada")


def test_the_server_acts_for_users_and_writes_no_result(lab: Lab, stores: dict[str, Store], make: type[Make]) -> None:
    web, host = stores["web"], stores["host1"]
    run_id = submit(web, shards(1), "ada", builds=[NewBuild(key(0), "tools", job(0), {})])
    web.cluster.add_built(Build(key(0), "built", "a" * 64, 5))
    agent(host)
    phone = make.device("phone", "hardware")
    host.devices.see([Seen(phone, "device", None)])
    for user in ("ada", "bob"):
        web.leases.release([lease_of(web, "left", user)])
        web.leases.reserve("left", user, 600)
        assert web.leases.cancel("left", user)
    web.alerts.remark("job:x", Remark("acknowledged", "ada", "", "mine"))
    web.devices.set_service(phone.id, False, "wobbly", "ada")
    assert web.accounts.of_token(web.accounts.add("ada", Role.DEVELOPER)) is not None
    begin_id = web.accounts.record("ada", "disable", "{}")
    assert [one.outcome for one in web.accounts.audit(2)] == ["not ended"]
    web.accounts.record("ada", "disable", "{}", "done", begin_id)
    assert [one.outcome for one in web.accounts.audit(2)] == ["done"]
    web.accounts.remove("ada")
    assert web.cluster.cancel(run_id, "bob", may_others=True)
    assert web.runs.view(run_id).user == "ada"
    with refused():
        web.record_attempt(run_id, make.attempt(job(0)))
    may_delete = {"account", "alert", "shard_weights", "waiter"}
    unwritten = ("attempt", "artifact", "measurement", "agent", "nightly_start", "quota")
    changes = (
        "attempt SET verdict = 'passed'", "run_job SET decisive_verdict = 'passed'", "run SET user_name = 'bob'",
        "run_order SET user_name = 'bob'", "measurement SET p50 = 0", "agent SET token = ''",
        "shard SET state = 'ended'", "shard_jobs SET done = '[]'", "triage SET note = ''",
        "audit SET outcome = 'done'", "quota SET most = 1",
    )  # fmt: skip
    refuse(
        lab,
        "web",
        *(f"DELETE FROM {table}" for table in sorted(set(metadata.tables) - may_delete)),
        *(f"UPDATE {change}" for change in changes),
        *(f"INSERT INTO {table} SELECT * FROM {table} WHERE false" for table in unwritten),
        "SET ROLE farm_agent",
        "SET ROLE lab",
        "CREATE TABLE public.run2 (a int)",
        "DROP TRIGGER farm_guard_ended ON run",
        *(f"SELECT {call}" for call in ("farm_end_build(1, 0, false)", "farm_remove_ended_messages(0)")),
        *(f"SELECT {call}" for call in ("procrastinate_fetch_job_v2(NULL, 1)", "farm_finish_runs('{}')")),
        words="permission denied|must be owner",
    )


def test_shards_divide_by_durations_of_their_own_login(lab: Lab, stores: dict[str, Store]) -> None:
    web, host2 = stores["web"], stores["host2"]
    assert web.selection.agree_on_seconds({"a": 1.0}, "virtual") == {"a": 1.0}
    for login, attack in (
        ("host2", "UPDATE shard_weights SET seconds = '[9]' WHERE user_name = 'web'"),
        ("host1", "UPDATE shard_weights SET user_name = 'host1', seconds = '[9]'"),
        ("host2", "DELETE FROM shard_weights"),
        ("host2", "INSERT INTO shard_weights VALUES ('web', 'x', 0, '[9]')"),
    ):
        with refused("own login", "the durations belong to web"):
            lab.sql(login, attack)
    assert host2.selection.agree_on_seconds({"a": 5.0}, "virtual") == {"a": 5.0}
    for store in (web, host2, stores["host1"]):
        agreed = store.selection.agree_on_seconds({"a": 7.0}, "virtual")
        assert agreed == {"a": {"web": 1.0, "host2": 5.0}.get(store.user, 7.0)}
    # A call removes rows of all logins that no call has asked for in a month.
    lab.sql("lab", "UPDATE shard_weights SET asked_ms = 0 WHERE user_name = 'web'")
    host2.selection.agree_on_seconds({"a": 8.0}, "virtual")
    assert lab.sql("vic", "SELECT user_name FROM shard_weights ORDER BY 1") == [("host1",), ("host2",)]


def test_an_agent_deletes_and_rewrites_no_history(lab: Lab, stores: dict[str, Store]) -> None:
    host = stores["host1"]
    submit(stores["web"], shards(1), "ada")
    one = agent(host)
    [held] = claim(host, one)
    record(host, one, held, 0)
    may_delete = {"agent_device", "alert", "build_wanted", "shard_weights", "waiter"}
    changes = (
        "attempt SET verdict = 'failed'", "run SET user_name = 'x'", "run SET started_ms = 0",
        "measurement SET p50 = 0", "run_job SET case_id = 1", "triage SET note = ''", "job SET name = 'x'",
        "artifact SET sha256 = ''", "quota SET most = 1",
    )  # fmt: skip
    refuse(
        lab,
        "host1",
        *(f"DELETE FROM {table}" for table in sorted(set(metadata.tables) - may_delete)),
        *(f"TRUNCATE {table} CASCADE" for table in sorted(set(metadata.tables) - may_delete)),
        *(f"UPDATE {change}" for change in changes),
        "INSERT INTO quota VALUES ('user:ada', 1, 'x', 0)",
        "DELETE FROM procrastinate_jobs",
        "INSERT INTO procrastinate_jobs (queue_name, task_name) VALUES ('a', 'b')",
        words="permission denied|must be owner",
    )
    with refused("in the name of ada"):
        host.begin_run(RunRecord("farm nightly", "ada", "bench", {}))
    host.begin_run(RunRecord("farm nightly", "host1", "bench", {}))
    # The functions do not find tables that a login has put in front in its search path.
    empty = submit(stores["web"], [], "ada")
    lab.sql("host1", f"CREATE TEMP TABLE procrastinate_jobs (id int); SELECT farm_finish_runs('{{{empty}}}')")
    found = lab.sql("lab", "SELECT count(*) FROM procrastinate_jobs WHERE queueing_lock = 'finish:' || %s", empty)
    assert found == [(1,)]
    lab.sql("lab", "DELETE FROM procrastinate_jobs")


def test_a_build_host_makes_bundles_under_its_role(lab: Lab, stores: dict[str, Store]) -> None:
    web, maker, other = stores["web"], stores["hostc"], stores["hostd"]
    wanted = [NewBuild(key(n), "tools", job(n), {}, position=n) for n in range(6)]
    run_id = submit(web, shards(3), "ada", builds=wanted)
    build_only = facts("c1", devices=0, toolchains=("tools",))
    me = maker.cluster.register("c1", build_only, LONG_S, user="hostc")
    them = other.cluster.register("d1", replace(build_only, host="d1"), LONG_S, user="hostd")
    maker.cluster.begun(me)
    assert not maker.cluster.may_lease
    worker = maker.cluster.begin_worker()
    first = take_build(maker, worker, "c1", "tools")
    # Another build host cannot end this host's job.
    for state in ("built", "failed"):
        with pytest.raises(LeaseLostError):
            other.cluster.record_build(first, Build(first.task.key, state, "f" * 64, 5))
    assert maker.cluster.keep_workers([worker], [first.task.key]) == ()
    maker.cluster.record_build(first, Build(first.task.key, "built", "a" * 64, 5))
    second = take_build(maker, worker, "c1", "tools")
    maker.cluster.record_build(second, Build(second.task.key, "failed", log="no"))
    third = take_build(maker, worker, "c1", "tools")
    maker.cluster.put_back_build(third, "c1", why="no room")
    again = take_build(other, other.cluster.begin_worker(), "d1", "tools")
    assert again.task == third.task
    other.cluster.put_back_build(again, "d1", why="no room there")
    states = {one.key: (one.state, one.reply.reason if one.reply else "") for one in web.cluster.build_of(
        [first.task.key, second.task.key, third.task.key]).values()}  # fmt: skip
    assert sorted(states.values()) == [("built", ""), ("failed", ""), ("failed", "c1: no room; d1: no room there")]
    assert maker.cluster.heartbeat(me, build_only, LONG_S).lost == ()
    # A task that cannot be read ends the runs that want it, and no other build.
    lab.sql("lab", "UPDATE build SET task = '{' WHERE state = 'waiting'")
    assert maker.cluster.take_build(worker, "c1", ["tools"]) is None
    assert web.cluster.progress(run_id, 0).order.state == "cancelled"
    maker.cluster.end_worker(worker)
    other.cluster.leave(them)
    maker.cluster.leave(me)
    assert web.cluster.agents() == []


def test_a_build_host_writes_nothing_but_bundles_and_itself(lab: Lab, stores: dict[str, Store]) -> None:
    run_id = submit(stores["web"], shards(1), "ada", builds=[NewBuild(key(0), "tools", job(0), {})])
    agent(stores["host1"])
    maker = stores["hostc"]
    refuse(
        lab,
        "hostc",
        *(f"INSERT INTO {table} SELECT * FROM {table}" for table in COLUMNS),
        *(f"DELETE FROM {table}" for table in COLUMNS),
        *(f"UPDATE {table} SET {column} = NULL" for table, column in COLUMNS.items()),
        *(f"SELECT * FROM {table}" for table in COLUMNS if table not in ("agent", "build", "build_wanted")),
        "SELECT * FROM procrastinate_fetch_job_v2(NULL, 1)",
        *(f"SELECT {name}('{{}}')" for name in ("farm_finish_runs", "farm_drop_builds", "farm_apply_builds")),
        "SELECT procrastinate_finish_job_v1(1, 'failed', true)",
        "DELETE FROM procrastinate_jobs",
        "SELECT terms FROM run_order",
        "UPDATE agent SET token = 'mine'",
        "SET ROLE farm_agent",
    )
    # A job that it has not taken.
    [(number,)] = lab.sql("lab", "SELECT id FROM procrastinate_jobs WHERE task_name = 'farm.build'")
    record = "SELECT farm_record_build(%s, 0, 'built', 'e', 1, NULL, '', NULL)"
    assert lab.sql("hostc", record, number) == [(False,)]
    with pytest.raises(psycopg.Error, match="cannot be read"):
        lab.sql("hostc", record.replace("'', NULL", "'', '{}'"), number)
    assert lab.sql("hostc", "SELECT farm_refuse_build(%s, 0, '', 'farm: no')", number) == [(False,)]
    with refused("another login"):
        maker.cluster.register("h1", facts("h1", devices=0), TTL_S, user="hostc", replaces=_token_of(lab, "h1"))
    with refused("another login"):
        maker.cluster.register("c1", facts("c1", devices=0), TTL_S, user="host1")
    with refused("need a protocol"):
        lab.sql("hostc", "INSERT INTO agent VALUES ('x', '', 'hostc', '{}', 0, 0, 0, false, false)")
    assert stores["web"].cluster.progress(run_id, 0).order.state == "open"


def _token_of(lab: Lab, name: str) -> str:
    return str(lab.sql("lab", "SELECT token FROM agent WHERE name = %s", name)[0][0])


def test_an_agent_changes_no_run_of_a_user_that_has_ended(lab: Lab, stores: dict[str, Store]) -> None:
    web, host = stores["web"], stores["host1"]
    run_id = submit(web, shards(1), "ada")
    one = agent(host, ttl_s=LONG_S)
    [held] = claim(host, one, ttl_s=LONG_S)
    for change in ("user_name = 'bob'", "terms = 'x'", "priority = 0"):
        with refused("may not change these columns", "permission denied"):
            lab.sql("host1", f"UPDATE run_order SET {change} WHERE run_id = %s", run_id)
    host.cluster.record(one, [result(held, of) for of in held.jobs], ttl_s=LONG_S)
    host.cluster.release(one, [held.lease])
    assert finish(host, run_id) == 0
    assert finish(host, run_id) == 0
    for attack in (
        "UPDATE run_job SET decisive_verdict = 'failed' WHERE run_id = %s",
        "UPDATE run_job SET decisive_attempt_id = NULL WHERE run_id = %s",
        "UPDATE run_job SET fallback_ops = '{}' WHERE run_id = %s",
        "UPDATE run SET exit_code = 1 WHERE id = %s",
        "UPDATE run SET finished_ms = NULL, exit_code = NULL WHERE id = %s",
        "UPDATE run_order SET user_name = 'host1' WHERE run_id = %s",
        "UPDATE run_order SET state = 'open' WHERE run_id = %s",
        """INSERT INTO attempt (run_job_id, verdict, stage, reason, started_ms, recorded_ms, seconds, bundle_key,
               known_issue, notes, log)
           SELECT id, 'failed', 'done', '', 0, 0, 0, '', '', '[]', '' FROM run_job WHERE run_id = %s""",
        """INSERT INTO artifact (attempt_id, sha256, size, kind) SELECT attempt.id, 'x', 1, 'x' FROM attempt
           JOIN run_job ON run_job.id = run_job_id WHERE run_id = %s""",
    ):
        with refused("has ended", "permission denied"):
            lab.sql("host1", attack, run_id)
    view = web.runs.view(run_id)
    assert (view.exit_code, view.user, [str(each.decisive.verdict) for each in view.jobs if each.decisive]) == (
        0, "ada", ["passed", "passed"],
    )  # fmt: skip
    # A user who can make a table cannot use a trigger function that runs as the owner.
    with refused("permission denied"):
        lab.sql("web", "CREATE TEMP TABLE attack (id bigint, run_job_id bigint, verdict text); CREATE TRIGGER attack"
                " AFTER INSERT ON attack FOR EACH ROW EXECUTE FUNCTION attempt_decides()")  # fmt: skip
    # A continued run of a user can be finished again, and so can a run of the agent's own login.
    web.cluster.submit(new_order(run_id), shards(1, first=5), jobs=[job(5), job(6)], again=True)
    [held] = claim(host, one, ttl_s=LONG_S)
    assert host.cluster.record(one, [result(held, of) for of in held.jobs], ttl_s=LONG_S) == {}
    assert finish(host, run_id) == 0
    own = submit(host, shards(1, first=7), "host1")
    assert host.cluster.cancel(own, "host1")
    assert finish(host, own) == 130
    again = new_order(own, user="host1", priority=Priority.NIGHTLY)
    host.cluster.submit(again, shards(1, first=9), jobs=[job(9), job(10)], again=True)
    assert web.cluster.progress(own, 0).order.state == "open"


def test_a_reader_reads_and_writes_nothing(lab: Lab, stores: dict[str, Store]) -> None:
    vic = stores["vic"]
    run_id = submit(stores["web"], shards(1), "ada")
    assert vic.runs.view(run_id).user == "ada"
    assert vic.cluster.queue()
    assert vic.devices.all() == []
    calls = ("farm_finish_runs('{}')", "farm_remove_ended_messages(0)", "farm_retry_messages(0)",
             "procrastinate_fetch_job_v2('{}', 1)", "procrastinate_finish_job_v1(1, 'failed', true)")  # fmt: skip
    refuse(
        lab,
        "vic",
        *(f"INSERT INTO {table} SELECT * FROM {table} WHERE false" for table in COLUMNS),
        *(f"DELETE FROM {table} WHERE false" for table in COLUMNS),
        *(f"SELECT * FROM {table} FOR UPDATE" for table in COLUMNS),
        *(f"UPDATE {table} SET {column} = {column} WHERE false" for table, column in COLUMNS.items()),
        *(f"SELECT {call}" for call in calls),
    )
    with refused("permission denied"):
        vic.messages.remove_ended(0)


def test_an_agents_worker_takes_messages_under_its_role(stores: dict[str, Store]) -> None:
    from farm.dispatch.cluster.delivery import MessageDelivery

    web = stores["web"]
    notes = LogLines()
    run_id = submit(web, shards(1), "ada")
    delivery = MessageDelivery(stores["host1"], recover=lambda: False, ttl_s=30)
    delivery.start()
    try:
        assert web.cluster.cancel(run_id, "ada")
        until(lambda: web.runs.view(run_id).exit_code == INTERRUPTED)
    finally:
        delivery.stop(2)
    assert notes == []


def test_members_of_the_owner_upgrade_and_what_they_make_is_the_owners(lab: Lab, stores: dict[str, Store]) -> None:
    lab.sql("lab", "DELETE FROM farm_messages")
    with refused("permission denied", "must be owner"):
        stores["host1"].messages.require()
    # As after an upgrade of Procrastinate without a new table of its own.
    lab.sql("lab", "INSERT INTO farm_messages VALUES ('03.04.00_50/0')")
    stores["mia"].messages.require()
    owners = lab.sql("lab", "SELECT DISTINCT proowner::regrole::text FROM pg_proc WHERE proname LIKE 'farm\\_%'")
    assert owners == [("lab",)]
    stores["host1"].messages.retry(30)
    lab.sql("lab", "DELETE FROM procrastinate_jobs")


def test_an_upgrade_by_the_owner_gives_the_rights_of_today(lab: Lab) -> None:
    lab.sql("farm", "CREATE ROLE gone_agent; CREATE ROLE gone_developer; CREATE ROLE gone_viewer")
    lab.create_database("old")
    with open_store(lab.address("lab", "old")) as store:
        store.messages.require()
    # State of an earlier farm, without a group of builders.
    lab.sql("lab", """
        CREATE TABLE farm_roles (prefix text PRIMARY KEY); INSERT INTO farm_roles VALUES ('gone');
        UPDATE farm_schema SET version_num = '0015'; UPDATE farm_messages SET version = replace(version, '/', '/0');
        ALTER TABLE run RENAME run_branch TO run_line; ALTER TABLE run RENAME run_nightly TO run_night;
        ALTER TABLE run_job RENAME skipped TO stale; ALTER TABLE alert RENAME alert_branch TO alert_line;
        ALTER TABLE nightly_start RENAME TO night_start;
        ALTER TABLE night_start RENAME CONSTRAINT pk_nightly_start TO pk_night_start;
        DROP TABLE account; DROP TABLE audit; ALTER TABLE lease DROP COLUMN reserved_from_ms;
        DROP FUNCTION farm_apply_builds(text[]); DROP FUNCTION farm_take_build(bigint, text[]);
        ALTER FUNCTION farm_shards_released() RENAME TO farm_shards_left;
        ALTER TRIGGER farm_shards_released ON shard RENAME TO farm_shards_left;
        GRANT UPDATE ON run_job, run_order TO gone_agent; GRANT UPDATE ON shard TO gone_developer;
        GRANT INSERT, UPDATE (run_began) ON run TO gone_developer;
        GRANT USAGE ON SEQUENCE triage_id_seq TO gone_developer;
        CREATE FUNCTION farm_is_mine(run text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
        CREATE FUNCTION farm_guard_run() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER farm_guard_run BEFORE INSERT OR UPDATE ON run FOR EACH ROW EXECUTE FUNCTION farm_guard_run();
        GRANT CREATE ON SCHEMA public TO PUBLIC
    """, database="old")  # fmt: skip
    open_store(lab.address("lab", "old")).close()
    for right, expected in {
        "has_column_privilege('gone_agent', 'run_job', 'decisive_verdict', 'UPDATE')": False,
        "has_column_privilege('gone_agent', 'run_job', 'skipped', 'UPDATE')": True,
        "has_column_privilege('gone_agent', 'run_order', 'user_name', 'UPDATE')": False,
        "has_column_privilege('gone_developer', 'shard', 'lacking', 'UPDATE')": False,
        "has_any_column_privilege('gone_developer', 'run', 'INSERT, UPDATE')": False,
        "has_sequence_privilege('gone_developer', 'triage_id_seq', 'USAGE')": False,
        "has_table_privilege('gone_developer', 'run', 'SELECT')": True,
        "has_function_privilege('gone_agent', 'attempt_decides()', 'EXECUTE')": False,
        "has_schema_privilege('gone_viewer', 'public', 'CREATE')": False,
        "has_function_privilege('gone_agent', 'farm_take_build(bigint, text[])', 'EXECUTE')": True,
        "(SELECT prosecdef FROM pg_proc WHERE proname = 'attempt_decides')": True,
        "(SELECT count(*) FROM pg_trigger WHERE tgname = 'farm_guard_ended')": 9,
        "(SELECT count(*) FROM pg_trigger WHERE tgname = 'farm_guard_run')": 0,
        "(SELECT count(*) FROM pg_proc WHERE proname IN ('farm_guard_run', 'farm_is_mine'))": 0,
        "(SELECT string_agg(tgname, ' ') FROM pg_trigger WHERE tgrelid = 'shard'::regclass"
        " AND tgname LIKE 'farm_shards%')": "farm_shards_released",
    }.items():
        assert lab.sql("lab", f"SELECT {right}", database="old") == [(expected,)], right


def test_objects_of_others_in_the_schema_are_in_the_way_of_roles(lab: Lab) -> None:
    """PostgreSQL 14 lets everyone make an operator that fits the columns of farm better than PostgreSQL's own."""
    lab.create_database("open")
    lab.sql("farm", "ALTER SCHEMA public OWNER TO farm; GRANT ALL ON SCHEMA public TO PUBLIC", database="open")
    with open_store(lab.address("lab", "open")) as store:
        store.messages.require()
        lab.sql("vic", """
            CREATE TABLE prey (who text);
            GRANT INSERT ON prey TO PUBLIC;
            CREATE FUNCTION trap(varchar, varchar) RETURNS boolean LANGUAGE sql VOLATILE AS
                'INSERT INTO prey VALUES (current_user); SELECT $1::text = $2::text';
            CREATE OPERATOR = (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = trap)
        """, database="open")  # fmt: skip
        submit(store, shards(1), "lab")
    # The owner of the tables has executed it.
    assert ("lab",) in lab.sql("vic", "SELECT who FROM prey", database="open")
    with open_store(lab.address("farm", "open")) as store:
        with pytest.raises(StoreError, match=r"objects of other users.*trap\(.*of vic"):
            store.roles.apply()
        lab.sql("vic", "DROP FUNCTION trap CASCADE", database="open")
        store.roles.apply()
    with refused("permission denied"):
        lab.sql("vic", "CREATE FUNCTION trap(varchar) RETURNS boolean LANGUAGE sql AS 'SELECT true'", database="open")


def test_a_store_without_roles_is_as_it_was(lab: Lab) -> None:
    lab.create_database("plain")
    with open_store(lab.address("lab", "plain")) as store:
        run_id = submit(store, shards(1), "whoever")
        one = agent(store)
        [held] = claim(store, one)
        record(store, one, held)
        store.messages.retry(30)
        store.finish_run(run_id, 0)
    # Other logins have no rights there.
    with refused():
        lab.sql("web", "SELECT * FROM run", database="plain")


def test_roles_are_of_postgresql(sqlite_store: Store) -> None:
    with pytest.raises(UsageError, match="a file has no roles"):
        sqlite_store.roles.script()
    assert sqlite_store.user


@pytest.mark.whole
def test_commands_under_their_roles(lab: Lab, stores: dict[str, Store], home: FarmHome) -> None:
    submit(stores["web"], shards(1), "ada")

    def farm(user: str, *words: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
        env = {"FARM_STORE": lab.address(user), "FARM_ARTIFACTS": f"file://{home.cwd}/artifacts", "LOGNAME": "somebody"}
        return home.farm(*words, env=env, code=code)

    for user in ("web", "vic", "host1", "mia"):
        for command in ("status", "devices list", "runs list"):
            done = farm(user, *command.split())
            assert done.returncode in (0, 2), (user, command, done.stderr)
            assert "permission denied" not in done.stderr, (user, command, done.stderr)
    json.loads(farm("web", "alerts", "list", "--json", code=0).stdout)
    printed = farm("mia", "lab", "roles", code=0)
    assert "CREATE ROLE" in printed.stdout
    # A superuser can apply the printed script.
    lab.sql("farm", printed.stdout)
    farm("web", "lab", "roles", "--apply", code=8)
    for words in ("alerts assign ops/case_0 --owner vic", "runs cancel latest --force"):
        refusal = farm("vic", *words.split(), code=8)
        assert refusal.stderr.count("\n") == 1, refusal.stderr
        assert "set FARM_SERVER and FARM_TOKEN" in refusal.stderr
    assert "hostc may only build" in farm("hostc", "lab", "agent", "--build", code=2).stderr
