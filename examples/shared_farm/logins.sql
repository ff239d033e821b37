-- Who signs in: a role for each host, in one of the groups that farm lab roles has made. Persons have accounts of farm serve.
-- psql farm <logins.sql, then a password for each, which the server never sees in clear: \password host_a
CREATE ROLE host_a LOGIN;
CREATE ROLE host_b LOGIN;
GRANT farm_agent TO host_a, host_b;

-- Only compiles: farm-build.service.
CREATE ROLE host_c LOGIN;
GRANT farm_builder TO host_c;

-- farm serve, which acts for its accounts.
CREATE ROLE web LOGIN;
GRANT farm_server TO web;

-- Upgrades tables, prunes, sets quotas: a member of the owner of the tables.
CREATE ROLE mia LOGIN;
GRANT lab TO mia;

-- The screen in the corridor, or a person's own queries (farm data sql): reads.
CREATE ROLE wall LOGIN;
GRANT farm_reader TO wall;
