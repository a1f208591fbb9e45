-- What a server tells of itself, to whoever may log in.

-- name: settings
SELECT name, reset_val, source FROM pg_settings WHERE name = ANY(%s::text[])

-- name: server
SELECT pg_is_in_recovery(), getdatabaseencoding()::text, current_setting('transaction_read_only'),
    (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user),
    (SELECT datconnlimit FROM pg_database WHERE datname = current_database()),
    (SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL AND application_name <> %s),
    pg_database_size(current_database()), current_user::text

-- name: backend
SELECT pg_backend_pid()

-- name: clock
SELECT extract(epoch FROM clock_timestamp())::float8

-- name: replicas
SELECT state, sync_state, coalesce(extract(epoch FROM replay_lag), 0)::float8,
    coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn), 0)::bigint
FROM pg_stat_replication

-- name: refused
SELECT 'the schema' FROM pg_namespace s WHERE s.nspname = %s AND NOT has_schema_privilege(s.oid, 'USAGE')
UNION ALL SELECT c.relname::text FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = %s AND c.relname LIKE 'sp\_%%' AND CASE c.relkind
    WHEN 'r' THEN NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
        AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'))
    WHEN 'S' THEN NOT has_sequence_privilege(c.oid, 'USAGE')
    ELSE false END
UNION ALL SELECT p.proname::text || '()' FROM pg_proc p JOIN pg_namespace s ON s.oid = p.pronamespace
WHERE s.nspname = %s AND p.proname LIKE 'sp\_%%' AND NOT has_function_privilege(p.oid, 'EXECUTE')

-- name: parts
SELECT c.relname::text FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = %s AND c.relkind IN ('r', 'p') AND c.relname LIKE 'sp\_%%'
UNION SELECT p.proname::text || '()' FROM pg_proc p JOIN pg_namespace s ON s.oid = p.pronamespace
WHERE s.nspname = %s AND p.proname LIKE 'sp\_%%'

-- name: write
INSERT INTO {s}.sp_meta (key, value) VALUES (%s, extract(epoch FROM clock_timestamp())::bigint::text)
ON CONFLICT (key) DO UPDATE SET value = excluded.value RETURNING value

-- name: read
SELECT value FROM {s}.sp_meta WHERE key = %s

-- With those that a process left behind that ended in the middle of it.
-- name: clean
DELETE FROM {s}.sp_meta WHERE key = %s
    OR key LIKE 'check %%' AND value::bigint < extract(epoch FROM clock_timestamp()) - 3600
