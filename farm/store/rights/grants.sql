-- Rights of each group. The owner of the tables runs this file, and each upgrade runs it again by itself.
--
--   owner       everything
--   agent       records results and states of devices, executes submitted runs, deletes and rewrites no history
--   builder     makes bundles: an agent without devices, whose host may be attacked by code of suites
--   developer   submits, cancels, leases and remarks in his own name, writes no result and no row of an agent
--   viewer      reads

-- Begin without rights: rights that only an earlier version granted are revoked.
DO $$
DECLARE
    one record;
    groups text := (SELECT string_agg(quote_ident(rolname), ', ') FROM pg_roles
        WHERE rolname IN ('{agent}', '{builder}', '{developer}', '{viewer}'));
BEGIN
    FOR one IN SELECT oid::regclass AS name, CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind FROM pg_class
        WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'S') AND relowner = {tables_owner_text}::regrole
    LOOP
        EXECUTE format('REVOKE ALL ON %s %s FROM PUBLIC, %s', one.kind, one.name, groups);
    END LOOP;
END;
$$;
GRANT USAGE ON SCHEMA {schema} TO {agent}, {developer}, {viewer};
-- On a server that began as PostgreSQL 14 all users may create objects in the schema: an operator there that fits
-- better than PostgreSQL's own would run as each agent. Only the owner of the schema, perhaps another role, can revoke
-- that: groups.sql revokes it as well.
DO $$
BEGIN
    IF pg_has_role((SELECT nspowner FROM pg_namespace WHERE oid = '{schema}'::regnamespace), 'USAGE') THEN
        REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;
    END IF;
END;
$$;

-- All groups read all tables except for Procrastinate's messages, which carry no information.
GRANT SELECT ON farm_schema, farm_messages, farm_roles,
    account, agent, agent_device, alert, artifact, attempt, audit, build, build_wanted, comparison, counter, device, device_state,
    fingerprint, health_event, job, layer, lease, measurement, night_start, op_profile, quota, run, run_device, run_job,
    run_order, series, shard, shard_jobs, shard_weights, soc_look, suite_case, triage, waiter
    TO {agent}, {developer}, {viewer};

-- Agents insert history, and change only columns that end or decide a run.
GRANT INSERT ON alert, artifact, attempt, comparison, counter, device, fingerprint, health_event, job, layer,
    measurement, op_profile, run, run_device, run_job, series, suite_case, triage TO {agent};
GRANT UPDATE (finished_ms, exit_code, run_began, fingerprint_hash, run_device_kind) ON run TO {agent};
GRANT UPDATE (build_seconds, cached, bundle_key, fallback_ops, operators, program_hash, stale) ON run_job TO {agent};
GRANT UPDATE ON alert TO {agent};
GRANT UPDATE (reason) ON health_event TO {agent};
GRANT INSERT, UPDATE ON agent, build, device_state, lease, night_start, shard, shard_jobs, soc_look TO {agent};
GRANT INSERT, DELETE ON build_wanted TO {agent};
GRANT INSERT, UPDATE, DELETE ON agent_device, shard_weights, waiter TO {agent};
-- Alerts of an earlier look at the same run may go: a guard keeps all others.
GRANT DELETE ON alert TO {agent};

-- The user of a run never changes.
GRANT INSERT, UPDATE (priority, purpose, protocol, terms, devices, labels, classes, most_devices, most_failures, failures,
    bundles, until_ms, state, cancelled_by, submitted_ms, ended_ms) ON run_order TO {agent}, {developer};

-- Developers change only their own rows, by the guards.
GRANT INSERT ON fingerprint, job, run, run_job, suite_case, triage TO {developer};
GRANT UPDATE (run_began, finished_ms, exit_code) ON run TO {developer};
GRANT UPDATE (build_seconds, cached, bundle_key, fallback_ops, operators, program_hash, stale) ON run_job TO {developer};
GRANT INSERT, UPDATE ON build, device_state, lease TO {developer};
GRANT INSERT ON build_wanted, shard, shard_jobs TO {developer};
GRANT INSERT, UPDATE, DELETE ON shard_weights, waiter TO {developer};

-- Sequences, for the ids of new rows.
DO $$
DECLARE
    one record;
BEGIN
    FOR one IN
        SELECT seq.oid::regclass AS name, tab.oid AS of FROM pg_class AS seq
        JOIN pg_depend ON pg_depend.objid = seq.oid AND pg_depend.deptype IN ('a', 'i')
        JOIN pg_class AS tab ON tab.oid = pg_depend.refobjid
        WHERE seq.relkind = 'S' AND tab.relnamespace = '{schema}'::regnamespace
    LOOP
        IF has_table_privilege('{agent}', one.of, 'INSERT') THEN
            EXECUTE format('GRANT USAGE ON SEQUENCE %s TO {agent}', one.name);
        END IF;
        IF has_table_privilege('{developer}', one.of, 'INSERT') THEN
            EXECUTE format('GRANT USAGE ON SEQUENCE %s TO {developer}', one.name);
        END IF;
    END LOOP;
END;
$$;

-- Functions for messages and bundles run as the owner, so that no group needs to write Procrastinate's tables. An
-- upgrade by the owner, who cannot create the group of builders, leaves builders out: farm lab roles creates the group.
DO $$
DECLARE
    one record;
    has_builders boolean := EXISTS (SELECT FROM pg_roles WHERE rolname = '{builder}');
BEGIN
    FOR one IN
        SELECT oid::regprocedure AS name, proname IN (
            'procrastinate_register_worker_v1', 'procrastinate_unregister_worker_v1', 'procrastinate_update_heartbeat_v1',
            'farm_take_build', 'farm_end_build', 'farm_record_build', 'farm_put_back_build', 'farm_refuse_build'
        ) AS is_of_builders
        FROM pg_proc
        WHERE pronamespace = '{schema}'::regnamespace AND prorettype <> 'trigger'::regtype
        AND (proname LIKE 'procrastinate\_%' OR proname IN (
            'farm_finish_runs', 'farm_defer_builds', 'farm_take_build', 'farm_end_build', 'farm_record_build',
            'farm_drop_builds', 'farm_put_back_build', 'farm_refuse_build', 'farm_retry_messages',
            'farm_remove_ended_messages'
        ))
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', one.name);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO {agent}', one.name);
        IF has_builders AND one.is_of_builders THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO {builder}', one.name);
        END IF;
    END LOOP;
    IF has_builders THEN
        GRANT USAGE ON SCHEMA {schema} TO {builder};
        GRANT SELECT ON farm_schema, farm_messages, farm_roles, agent, build, build_wanted TO {builder};
        GRANT SELECT (run_id, state) ON run_order TO {builder};
        GRANT INSERT, UPDATE ON agent TO {builder};
    END IF;
END;
$$;
GRANT SELECT ON procrastinate_jobs, procrastinate_workers, procrastinate_events TO {agent};
-- Columns that show whether a bundle is being made.
GRANT SELECT (queueing_lock, status) ON procrastinate_jobs TO {developer}, {viewer};
