-- Who signs in: a role for each host and each person, in one of the groups that farm lab roles has made.
-- psql farm <logins.sql, then a password for each, which the server never sees in clear: \password host_a
CREATE ROLE host_a LOGIN;
CREATE ROLE host_b LOGIN;
GRANT farm_agent TO host_a, host_b;

-- Only compiles: farm-build.service.
CREATE ROLE host_c LOGIN;
GRANT farm_builder TO host_c;

CREATE ROLE ada LOGIN;
GRANT farm_developer TO ada;

-- Upgrades tables, prunes, sets quotas.
CREATE ROLE mia LOGIN;
GRANT farm_owner TO mia;

-- The screen in the corridor: farm serve.
CREATE ROLE wall LOGIN;
GRANT farm_viewer TO wall;
