-- Rights of each group. The owner of the tables runs this file, and each upgrade runs it again by itself.
--
--   agent     records results and states of devices, executes submitted runs, deletes and rewrites no history
--   builder   makes bundles: an agent without devices, whose host may be attacked by code of suites
--   server    acts for users, in their names: farm serve decides by the role of the account; writes no result
--   reader    reads
--
-- An upgrade by the owner, who cannot create groups, leaves missing groups out: farm lab roles creates them. Groups of
-- earlier versions for persons, {developer} and {viewer}, read.
DO $$
DECLARE
    one record;
    readers text := (SELECT string_agg(quote_ident(rolname), ', ') FROM pg_roles
        WHERE rolname IN ('{agent}', '{server}', '{reader}', '{developer}', '{viewer}'));
    groups text := (SELECT string_agg(quote_ident(rolname), ', ') FROM pg_roles
        WHERE rolname IN ('{agent}', '{builder}', '{server}', '{reader}', '{developer}', '{viewer}'));
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA {schema} TO %s', groups);
    -- On a server that began as PostgreSQL 14 all users may create objects in the schema: an operator there that fits
    -- better than PostgreSQL's own would run as each agent. Only the owner of the schema, perhaps another role, can
    -- revoke that: groups.sql revokes it as well.
    IF pg_has_role((SELECT nspowner FROM pg_namespace WHERE oid = '{schema}'::regnamespace), 'USAGE') THEN
        REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;
    END IF;
    -- Begin without rights: rights that only an earlier version granted are revoked. Then readers read all tables except
    -- for Procrastinate's messages, which carry no information.
    FOR one IN SELECT oid::regclass AS name, relkind, relname FROM pg_class
        WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'S') AND relowner = {tables_owner_text}::regrole
    LOOP
        EXECUTE format('REVOKE ALL ON %s %s FROM PUBLIC, %s',
            CASE one.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, one.name, groups);
        IF one.relkind = 'r' AND one.relname NOT LIKE 'procrastinate\_%' THEN
            EXECUTE format('GRANT SELECT ON %s TO %s', one.name, readers);
        END IF;
    END LOOP;
    -- Columns that show whether a bundle is being made.
    EXECUTE format('GRANT SELECT (queueing_lock, status) ON procrastinate_jobs TO %s', readers);

    FOR one IN SELECT role, rights, tables FROM (VALUES
        -- Agents insert history, and change only columns that end or decide a run.
        ('{agent}', 'INSERT', 'alert, artifact, attempt, comparison, counter, device, fingerprint, health_event, job, layer,
            measurement, op_profile, run, run_device, run_job, series, suite_case, triage'),
        ('{agent}', 'UPDATE (finished_ms, exit_code, run_began, fingerprint_hash, run_device_kind)', 'run'),
        ('{agent}', 'UPDATE (reason)', 'health_event'),
        ('{agent}', 'INSERT, UPDATE', 'agent, build, device_state, lease, nightly_start, shard, shard_jobs, soc_look'),
        ('{agent}', 'INSERT, DELETE', 'build_wanted'),
        ('{agent}', 'INSERT, UPDATE, DELETE', 'agent_device, shard_weights, waiter'),
        -- Alerts of an earlier look at the same run may go: a guard keeps all others.
        ('{agent}', 'UPDATE, DELETE', 'alert'),
        ('{agent}', 'SELECT', 'procrastinate_jobs, procrastinate_workers, procrastinate_events'),
        ('{server}', 'INSERT', 'audit, build_wanted, fingerprint, health_event, job, run, run_job, shard, shard_jobs,
            suite_case, triage'),
        ('{server}', 'INSERT, UPDATE', 'build, device_state, lease'),
        ('{server}', 'INSERT, UPDATE, DELETE', 'account, alert, shard_weights, waiter'),
        ('{server}', 'UPDATE (finished_ms, exit_code, run_began)', 'run'),
        ('{builder}', 'SELECT', 'farm_schema, farm_messages, farm_roles, agent, build, build_wanted'),
        ('{builder}', 'SELECT (run_id, state)', 'run_order'),
        ('{builder}', 'INSERT, UPDATE', 'agent')
    ) AS own (role, rights, tables)
    UNION ALL SELECT role, rights, tables FROM (VALUES
        ('UPDATE (build_seconds, cached, bundle_key, fallback_ops, operators, program_hash, skipped)', 'run_job'),
        -- The user of a run never changes.
        ('INSERT, UPDATE (priority, purpose, protocol, terms, devices, labels, classes, most_devices, most_failures,
            failures, bundles, until_ms, state, cancelled_by, submitted_ms, ended_ms)', 'run_order')
    ) AS common (rights, tables), (VALUES ('{agent}'), ('{server}')) AS both_of (role)
    LOOP
        IF EXISTS (SELECT FROM pg_roles WHERE rolname = one.role) THEN
            EXECUTE format('GRANT %s ON %s TO %I', one.rights, one.tables, one.role);
        END IF;
    END LOOP;

    -- Sequences, for the ids of new rows.
    FOR one IN
        SELECT seq.oid::regclass AS name, rolname AS role FROM pg_class AS seq
        JOIN pg_depend ON pg_depend.objid = seq.oid AND pg_depend.deptype IN ('a', 'i')
        JOIN pg_class AS tab ON tab.oid = pg_depend.refobjid
        JOIN pg_roles ON rolname IN ('{agent}', '{server}') AND has_table_privilege(pg_roles.oid, tab.oid, 'INSERT')
        WHERE seq.relkind = 'S' AND tab.relnamespace = '{schema}'::regnamespace
    LOOP
        EXECUTE format('GRANT USAGE ON SEQUENCE %s TO %I', one.name, one.role);
    END LOOP;

    -- Functions for messages and bundles run as the owner, so that no group needs to write Procrastinate's tables.
    FOR one IN
        SELECT pg_proc.oid::regprocedure AS name, rolname AS role, proname LIKE 'procrastinate\_%' AND rolname = '{agent}'
            OR proname IN (
                'procrastinate_register_worker_v1', 'procrastinate_unregister_worker_v1',
                'procrastinate_update_heartbeat_v1', 'farm_take_build', 'farm_end_build', 'farm_record_build',
                'farm_put_back_build', 'farm_refuse_build'
            ) OR rolname = '{agent}' AND proname IN (
                'farm_finish_runs', 'farm_defer_builds', 'farm_drop_builds', 'farm_retry_messages',
                'farm_remove_ended_messages'
            ) AS may_call
        FROM pg_proc JOIN pg_roles ON rolname IN ('{agent}', '{builder}')
        WHERE pronamespace = '{schema}'::regnamespace AND prorettype <> 'trigger'::regtype
        AND (proname LIKE 'procrastinate\_%' OR proname LIKE 'farm\_%')
    LOOP
        IF one.may_call THEN
            EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', one.name);
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', one.name, one.role);
        END IF;
    END LOOP;
END;
$$;
