-- A task as a whole: walked, written, and mended. {s} is the schema of the tables.

-- name: numbers
SELECT n, last_seq, last_call, last_pause, last_line, last_position FROM {s}.sp_tasks WHERE task = %(task)s

-- name: lock
SELECT n, last_seq, last_call, last_pause, last_line, last_position, updated_at FROM {s}.sp_tasks WHERE task = %(task)s FOR UPDATE

-- name: task_alone
SELECT task, status, branch, agent, attempts, reason, parent, raised, created_at, updated_at, checkpoints
FROM {s}.sp_tasks WHERE n = %(n)s

-- name: counted
SELECT t.checkpoints, (SELECT count(*) FROM {s}.sp_checkpoints c WHERE c.task = t.n) FROM {s}.sp_tasks t WHERE t.n = %(n)s

-- name: tasks
SELECT task FROM {s}.sp_tasks WHERE task > %(after)s ORDER BY task LIMIT %(page)s

-- name: tasks_by_number
SELECT n, task FROM {s}.sp_tasks WHERE n > %(after)s AND n <= %(upto)s ORDER BY n LIMIT %(page)s

-- name: task_numbers
SELECT n FROM {s}.sp_tasks WHERE n > %(after)s AND n <= %(upto)s ORDER BY n LIMIT %(page)s

-- name: branches
SELECT space, name, head_seq, head_id, line, forked_from FROM {s}.sp_branches
WHERE task = %(n)s AND (space, name) > (%(space)s, %(name)s) ORDER BY space, name LIMIT %(page)s

-- name: checkpoint
SELECT seq, id, space, branch, parent_seq, step, kind, label, created_at, format, schema, size, pinned, digest, seal, metadata,
    metrics, refs, root
FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq > %(after)s AND seq <= %(upto)s ORDER BY seq LIMIT %(page)s

-- name: checkpoint_keys
SELECT seq FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq > %(after)s AND seq <= %(upto)s ORDER BY seq LIMIT %(page)s

-- name: call
SELECT no, line, step, scope, ident, tool, effect, call_id, idempotency_key, op_key, status, attempts, fence, base_seq, started_at,
    finished_at, asked, began, ended, not_done, superseded, reason, version, seal, policy, args_refs, result_refs, error, model,
    args, result
FROM {s}.sp_calls WHERE task = %(n)s AND no > %(after)s AND no <= %(upto)s ORDER BY no LIMIT %(page)s

-- name: call_keys
SELECT no FROM {s}.sp_calls WHERE task = %(n)s AND no > %(after)s AND no <= %(upto)s ORDER BY no LIMIT %(page)s

-- name: pause
SELECT no, line, step, space, name, occurrence, call_no, base_seq, status, asked_at, answered_at, version, seal, question, answer
FROM {s}.sp_pauses WHERE task = %(n)s AND no > %(after)s AND no <= %(upto)s ORDER BY no LIMIT %(page)s

-- name: pause_keys
SELECT no FROM {s}.sp_pauses WHERE task = %(n)s AND no > %(after)s AND no <= %(upto)s ORDER BY no LIMIT %(page)s

-- name: write
SELECT space, checkpoint, writer, idx, path, seal, refs, data FROM {s}.sp_writes
WHERE task = %(n)s AND (space, checkpoint, writer, idx) > (%(space)s, %(checkpoint)s, %(writer)s, %(idx)s)
ORDER BY space, checkpoint, writer, idx LIMIT %(page)s

-- name: write_keys
SELECT space, checkpoint, writer, idx FROM {s}.sp_writes
WHERE task = %(n)s AND (space, checkpoint, writer, idx) > (%(space)s, %(checkpoint)s, %(writer)s, %(idx)s)
ORDER BY space, checkpoint, writer, idx LIMIT %(page)s

-- name: write_named
SELECT space, checkpoint, writer, idx, path, seal, refs, data FROM {s}.sp_writes
WHERE task = %(n)s AND space = %(space)s AND checkpoint = %(checkpoint)s AND writer = %(writer)s AND idx = %(idx)s

-- Also of a PostgreSQL that cannot read a range of pages: no page of 8 kB has more rows than this.
-- name: write_keys_in
SELECT space, checkpoint, writer, idx FROM {s}.sp_writes
WHERE task = %(n)s AND ctid = ANY(ARRAY(
    SELECT format('(%%s,%%s)', p, i)::tid FROM generate_series(%(block)s::bigint, %(end)s::bigint - 1) p, generate_series(1, 291) i
))

-- name: write_blocks
SELECT pg_relation_size('{s}.sp_writes'::regclass) / current_setting('block_size')::bigint

-- name: object
SELECT name, refs, data FROM {s}.sp_objects WHERE task = %(n)s AND name > %(after)s AND name <= %(upto)s ORDER BY name LIMIT %(page)s

-- name: object_keys
SELECT name FROM {s}.sp_objects WHERE task = %(n)s AND name > %(after)s AND name <= %(upto)s ORDER BY name LIMIT %(page)s

-- name: object_names_in
SELECT name FROM {s}.sp_objects
WHERE task = %(n)s AND ctid >= format('(%%s,0)', %(block)s::bigint)::tid AND ctid < format('(%%s,0)', %(end)s::bigint)::tid

-- name: object_blocks
SELECT pg_relation_size('{s}.sp_objects'::regclass) / current_setting('block_size')::bigint, current_setting('server_version_num')::int

-- name: objects_named
SELECT name, refs, data FROM {s}.sp_objects WHERE task = %(n)s AND name = ANY(%(names)s::bytea[]) ORDER BY name

-- -- by what two tasks are told apart

-- name: checkpoint_seals
SELECT seq, seal FROM {s}.sp_checkpoints WHERE task = %(n)s

-- name: call_seals
SELECT no, seal FROM {s}.sp_calls WHERE task = %(n)s

-- name: pause_seals
SELECT no, seal FROM {s}.sp_pauses WHERE task = %(n)s

-- name: write_seals
SELECT space, checkpoint, writer, idx, seal FROM {s}.sp_writes WHERE task = %(n)s

-- name: all_branches
SELECT space, name, head_seq, head_id, line, forked_from FROM {s}.sp_branches WHERE task = %(n)s

-- -- writing

-- name: next_number
SELECT nextval(pg_get_serial_sequence(%(table)s, 'n'))

-- name: put_task
INSERT INTO {s}.sp_tasks (n, task, status, branch, agent, attempts, reason, parent, raised, created_at, updated_at, checkpoints,
    last_seq, last_call, last_pause, last_line, last_position, dropped)
OVERRIDING SYSTEM VALUE
VALUES (%(n)s, %(task)s, %(status)s, %(branch)s, %(agent)s, %(attempts)s, %(reason)s, %(parent)s, %(raised)s, %(created_at)s,
    %(updated_at)s, %(checkpoints)s, %(seq)s, %(call)s, %(pause)s, %(line)s, %(position)s, %(dropped)s)
ON CONFLICT (task) DO NOTHING RETURNING n

-- name: set_task
UPDATE {s}.sp_tasks SET status = %(status)s, branch = %(branch)s, agent = %(agent)s, attempts = %(attempts)s, reason = %(reason)s,
    parent = %(parent)s, raised = %(raised)s, created_at = %(created_at)s, updated_at = %(updated_at)s,
    checkpoints = %(checkpoints)s, last_seq = %(seq)s, last_call = %(call)s, last_pause = %(pause)s, last_line = %(line)s,
    last_position = %(position)s, dropped = %(dropped)s, sweeps = sweeps + 1, recent = '{{}}'
WHERE n = %(n)s

-- name: put_input
INSERT INTO {s}.sp_inputs (task, input) VALUES (%(n)s, %(input)s)

-- -- mending

-- Rows of old numbers have come: a sweep under way looks anew.
-- name: mended
UPDATE {s}.sp_tasks SET branch = %(branch)s, last_seq = %(seq)s, last_line = %(line)s, updated_at = %(at)s, sweeps = sweeps + 1,
    checkpoints = (SELECT count(*) FROM {s}.sp_checkpoints WHERE task = %(n)s)
WHERE n = %(n)s

-- name: drop_branches
DELETE FROM {s}.sp_branches WHERE task = %(n)s

-- name: quarantine
INSERT INTO {s}.sp_quarantine (kind, task, key, why, at, data) VALUES (%(kind)s, %(task)s, %(key)s, %(why)s, %(at)s, %(data)s)

-- -- strays

-- name: tables
SELECT c.relname::text FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = %(schema)s AND c.relkind IN ('r', 'p') AND c.relname LIKE 'sp\_%%' ORDER BY 1

-- name: bad_indexes
SELECT c.relname::text, i.indrelid::regclass::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
JOIN pg_class t ON t.oid = i.indrelid JOIN pg_namespace s ON s.oid = t.relnamespace
WHERE s.nspname = %(schema)s AND t.relname LIKE 'sp\_%%' AND NOT (i.indisvalid AND i.indisready)


-- name: amcheck
SELECT 1 FROM to_regprocedure('bt_index_check(regclass)') AS f WHERE f IS NOT NULL AND has_function_privilege(f, 'EXECUTE')

-- name: indexes
SELECT c.oid::bigint, c.relname::text, t.relname::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
JOIN pg_class t ON t.oid = i.indrelid JOIN pg_namespace s ON s.oid = t.relnamespace JOIN pg_am a ON a.oid = c.relam
WHERE s.nspname = %(schema)s AND t.relname LIKE 'sp\_%%' AND a.amname = 'btree' AND i.indisvalid

-- name: check_index
SELECT bt_index_check(%(oid)s::bigint::oid::regclass)

-- name: owned
SELECT 1 FROM {s}.sp_tasks WHERE n = %(n)s UNION ALL SELECT 1 FROM {s}.sp_stages WHERE n = %(n)s
