-- Groups without a login: GRANT {reader} TO wall. They belong to the server, not to one database.
-- Only this file needs a superuser, or CREATEROLE.
DO $$
DECLARE
    one text;
BEGIN
    -- Refuse functions and operators of other users, which PostgreSQL 14 let them create: they would run as each user.
    SELECT string_agg(format('%s of %I', found.name, pg_get_userbyid(found.owner)), ', ') INTO one FROM (
        SELECT oid, oid::regprocedure::text AS name, proowner AS owner FROM pg_proc
        WHERE pronamespace = '{schema}'::regnamespace
        UNION ALL SELECT oid, oid::regoperator::text, oprowner FROM pg_operator
        WHERE oprnamespace = '{schema}'::regnamespace
    ) AS found JOIN pg_roles ON pg_roles.oid = found.owner
    WHERE NOT rolsuper AND rolname <> {tables_owner_text}
      AND NOT EXISTS (SELECT 1 FROM pg_depend WHERE objid = found.oid AND deptype = 'e');
    IF one IS NOT NULL THEN
        RAISE EXCEPTION 'farm: schema {schema} has objects of other users, which run as whoever uses the store: %', one
            USING HINT = 'Look at them, drop them, then try again.';
    END IF;
    REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;
    GRANT USAGE, CREATE ON SCHEMA {schema} TO {tables_owner};
    FOREACH one IN ARRAY ARRAY['{agent}', '{builder}', '{server}', '{reader}'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = one) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', one);
        END IF;
    END LOOP;
END;
$$;
