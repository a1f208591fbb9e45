-- What removes. {s} is the schema of the tables.
--
-- A sweep takes the lock of the task's row first, in a statement of its own: what a later statement of that transaction reads is
-- all that was committed until then, and nothing is committed to that task before the sweep's end.

-- name: lock
SELECT n, last_call, last_pause, sweeps FROM {s}.sp_tasks WHERE task = %(task)s FOR UPDATE

-- version: the transaction that wrote the row last. Each commit to a task writes its row.
-- name: lock_number
SELECT last_seq, sweeps, xmin::text AS version, pg_snapshot_xmin(pg_current_snapshot())::text AS horizon
FROM {s}.sp_tasks WHERE n = %(n)s FOR UPDATE

-- name: standing
SELECT last_seq, sweeps, xmin::text AS version, pg_snapshot_xmin(pg_current_snapshot())::text AS horizon
FROM {s}.sp_tasks WHERE n = %(n)s

-- name: number
SELECT n FROM {s}.sp_tasks WHERE task = %(task)s

-- How much a sweep would read, up to a number.
-- name: amount
SELECT t.n, (SELECT count(*) FROM (SELECT 1 FROM {s}.sp_objects o WHERE o.task = t.n LIMIT %(most)s) AS a)
    + (SELECT count(*) FROM (SELECT 1 FROM {s}.sp_checkpoints c WHERE c.task = t.n LIMIT %(most)s) AS b)
    + (SELECT count(*) FROM (SELECT 1 FROM {s}.sp_calls c WHERE c.task = t.n LIMIT %(most)s) AS d)
    + (SELECT count(*) FROM (SELECT 1 FROM {s}.sp_writes c WHERE c.task = t.n LIMIT %(most)s) AS e)
FROM {s}.sp_tasks t WHERE t.task = %(task)s

-- name: live_objects
SELECT count(*) FROM (
    SELECT 1 FROM {s}.sp_objects WHERE task = (SELECT n FROM {s}.sp_tasks WHERE task = %(task)s) LIMIT %(most)s
) AS counted

-- -- what stays

-- name: branches
SELECT b.head_seq, b.forked_from, b.line, coalesce(c.step, 0), b.space = '' AND b.name = t.branch
FROM {s}.sp_branches b JOIN {s}.sp_tasks t ON t.n = b.task
LEFT JOIN {s}.sp_checkpoints c ON c.task = b.task AND c.seq = b.head_seq
WHERE b.task = %(n)s

-- name: counters
SELECT last_call, last_pause FROM {s}.sp_tasks WHERE n = %(n)s

-- name: holder
SELECT fence, token, process FROM {s}.sp_leases WHERE task = %(n)s AND state = 'held' AND NOT gone

-- Of all calls those that may keep a checkpoint; which of them do is for rules/retention.py to say.
-- name: standing_calls
SELECT DISTINCT base_seq, line, step, status, fence FROM {s}.sp_calls c
WHERE task = %(n)s AND (status = ANY(%(open)s::text[]) OR EXISTS (
    SELECT 1 FROM unnest(%(lines)s::bigint[], %(steps)s::bigint[]) AS first (line, step)
    WHERE first.line = c.line AND c.step >= first.step
))

-- name: newest_call_of
SELECT base_seq, line, step, status, fence FROM {s}.sp_calls
WHERE task = %(n)s AND fence = %(live)s ORDER BY base_seq DESC LIMIT 1

-- name: standing_pauses
SELECT DISTINCT base_seq, line, step, status FROM {s}.sp_pauses p
WHERE task = %(n)s AND (status = ANY(%(open)s::text[]) OR EXISTS (
    SELECT 1 FROM unnest(%(lines)s::bigint[], %(steps)s::bigint[]) AS first (line, step)
    WHERE first.line = p.line AND p.step >= first.step
))

-- What came to be needed after a look: a call that is passed and settled may only have been opened again, or be new.
-- name: newer_bases
SELECT base_seq FROM {s}.sp_calls WHERE task = %(n)s AND status IN ('started', 'in_doubt', 'paused')
UNION SELECT base_seq FROM {s}.sp_calls WHERE task = %(n)s AND no > %(call)s
UNION SELECT base_seq FROM {s}.sp_pauses WHERE task = %(n)s AND no > %(pause)s

-- -- rows that go

-- name: going
SELECT seq, octet_length(root) + octet_length(metadata) + octet_length(metrics) + octet_length(refs) + octet_length(id), id
FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq = ANY(%(seqs)s::bigint[]) AND space = %(space)s AND NOT pinned ORDER BY seq

-- A page of the calls that began from these, by number.
-- name: calls_of
SELECT no, base_seq, octet_length(args) + octet_length(args_refs) + coalesce(octet_length(result), 0) + octet_length(result_refs)
    + octet_length(policy)
FROM {s}.sp_calls WHERE task = %(n)s AND base_seq = ANY(%(seqs)s::bigint[]) AND no > %(after)s ORDER BY no LIMIT %(page)s

-- name: pauses_of
SELECT no, base_seq FROM {s}.sp_pauses WHERE task = %(n)s AND base_seq = ANY(%(seqs)s::bigint[]) AND no > %(after)s ORDER BY no LIMIT %(page)s

-- Of the writes at these checkpoints, by checkpoint, how many there are and how large.
-- name: writes_of
SELECT checkpoint, count(*), sum(octet_length(data) + octet_length(refs) + octet_length(writer) + octet_length(path))::bigint
FROM {s}.sp_writes WHERE task = %(n)s AND space = %(space)s AND checkpoint = ANY(%(ids)s::text[]) GROUP BY checkpoint

-- A pin does not wait for a sweep to end before it is believed, and the other way round: so it is looked at once more.
-- name: drop_checkpoints
DELETE FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq = ANY(%(seqs)s::bigint[]) AND NOT pinned RETURNING seq, id

-- Also those that came since they were counted.
-- name: drop_writes
DELETE FROM {s}.sp_writes WHERE task = %(n)s AND space = %(space)s AND checkpoint = ANY(%(ids)s::text[])

-- name: drop_calls
DELETE FROM {s}.sp_calls WHERE task = %(n)s AND no = ANY(%(nos)s::bigint[]) AND base_seq = ANY(%(seqs)s::bigint[]) RETURNING no

-- name: drop_pauses
DELETE FROM {s}.sp_pauses WHERE task = %(n)s AND no = ANY(%(nos)s::bigint[]) AND base_seq = ANY(%(seqs)s::bigint[])

-- name: dropped
UPDATE {s}.sp_tasks SET checkpoints = checkpoints - %(count)s WHERE n = %(n)s

-- A big save on its way sends again what this took.
-- name: swept
UPDATE {s}.sp_tasks SET sweeps = sweeps + 1 WHERE n = %(n)s RETURNING sweeps, xmin::text

-- -- objects that go

-- name: stages
SELECT k FROM {s}.sp_stages WHERE n = %(n)s

-- name: drop_stages
DELETE FROM {s}.sp_stages WHERE n = %(n)s AND until < clock_timestamp()

-- name: cut_off
SELECT 1 WHERE EXISTS (SELECT 1 FROM {s}.sp_checkpoints WHERE task = %(n)s AND octet_length(refs) %% 16 <> 0)
    OR EXISTS (SELECT 1 FROM {s}.sp_calls WHERE task = %(n)s AND (octet_length(args_refs) %% 16 <> 0 OR octet_length(result_refs) %% 16 <> 0))
    OR EXISTS (SELECT 1 FROM {s}.sp_writes WHERE task = %(n)s AND refs <> '' AND octet_length(refs) %% 16 <> 0)
    OR EXISTS (SELECT 1 FROM {s}.sp_objects WHERE task = %(n)s AND octet_length(refs) %% 16 <> 0)

-- Of a small task, in one go: what neither a root nor an object of a save on its way reaches.
-- name: unreached
WITH RECURSIVE runs (refs) AS (
    SELECT refs FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq <> ALL(%(without)s::bigint[])
    UNION ALL SELECT args_refs FROM {s}.sp_calls WHERE task = %(n)s AND base_seq <> ALL(%(without)s::bigint[])
    UNION ALL SELECT result_refs FROM {s}.sp_calls WHERE task = %(n)s AND base_seq <> ALL(%(without)s::bigint[])
    UNION ALL SELECT refs FROM {s}.sp_writes
        WHERE task = %(n)s AND refs <> '' AND (space <> %(space)s OR checkpoint <> ALL(%(without_ids)s::text[]))
    UNION ALL SELECT name || refs FROM {s}.sp_objects WHERE task = %(n)s AND stage IN (SELECT k FROM {s}.sp_stages WHERE n = %(n)s)
), reached (name) AS (
    SELECT substr(refs, i, 16) FROM runs, generate_series(1, octet_length(refs), 16) AS i
    UNION
    SELECT substr(o.refs, i, 16)
    FROM reached r JOIN {s}.sp_objects o ON o.task = %(n)s AND o.name = r.name, generate_series(1, octet_length(o.refs), 16) AS i
)
SELECT o.name, o.stage, 16 + octet_length(o.refs) + octet_length(o.data) FROM {s}.sp_objects o
WHERE o.task = %(n)s AND NOT EXISTS (SELECT 1 FROM reached r WHERE r.name = o.name)

-- name: checkpoint_roots
SELECT seq, refs FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq > %(after)s ORDER BY seq LIMIT %(page)s

-- name: call_roots
SELECT no, base_seq, args_refs, result_refs FROM {s}.sp_calls
WHERE task = %(n)s AND no > %(after)s AND (args_refs <> '' OR result_refs <> '') ORDER BY no LIMIT %(page)s

-- name: write_roots
SELECT k, space, checkpoint, refs FROM {s}.sp_writes
WHERE task = %(n)s AND k > %(after)s AND refs <> '' ORDER BY k LIMIT %(page)s

-- name: staged_roots
SELECT name, refs FROM {s}.sp_objects
WHERE task = %(n)s AND name > %(after)s AND stage = ANY(%(stages)s::bigint[]) ORDER BY name LIMIT %(page)s

-- Which calls were written since: by transactions that began no earlier than the horizon. Both are compared as ages, since numbers
-- of transactions come round; a row so old that its age has come round too is looked at once too often.
-- name: new_call_roots
SELECT args_refs, result_refs FROM {s}.sp_calls
WHERE task = %(n)s AND (args_refs <> '' OR result_refs <> '')
    AND age(xmin) <= age((%(horizon)s::bigint & 4294967295)::text::xid)

-- name: refs_of
SELECT name, refs FROM {s}.sp_objects WHERE task = %(n)s AND name = ANY(%(names)s::bytea[])

-- block: of the table. Deleting in the order of names would go to a page of its own for each.
-- name: object_page
SELECT name, stage, 16 + octet_length(refs) + octet_length(data), (ctid::text::point)[0]::bigint AS block FROM {s}.sp_objects
WHERE task = %(n)s AND name > %(after)s ORDER BY name LIMIT %(page)s

-- Only as they were seen: a big save may have taken one to itself. It waits for nobody, as that save waits for this.
-- name: drop_objects
DELETE FROM {s}.sp_objects WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {s}.sp_objects
    WHERE task = %(n)s AND name = ANY(%(names)s::bytea[]) AND (stage IS NULL OR stage <> ALL(%(stages)s::bigint[]))
    FOR UPDATE SKIP LOCKED
)) RETURNING 16 + octet_length(refs) + octet_length(data)

-- -- what is damaged

-- name: there
SELECT seq FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq = ANY(%(seqs)s::bigint[])

-- name: whole
SELECT seq, id, space, branch, parent_seq, step, kind, label, created_at, format, schema, size, pinned, digest, seal, metadata,
    metrics, refs, root
FROM {s}.sp_checkpoints WHERE task = %(n)s AND seq = ANY(%(seqs)s::bigint[])

-- name: objects
SELECT name, refs, data FROM {s}.sp_objects WHERE task = %(n)s AND name = ANY(%(names)s::bytea[])

-- -- pins and whole tasks

-- name: pin
UPDATE {s}.sp_checkpoints SET pinned = %(pinned)s WHERE task = %(n)s AND seq = %(seq)s AND space = %(space)s RETURNING seq

-- Under the task's lock nobody else takes or gives back the lease. It is not locked as well: where the work takes long, the beat of a
-- holder whose time had passed would wait for it, and with it those of all other tasks that this holder has.
-- name: lease
SELECT fence, token, process, holder, acquired_at, state = 'held' AND NOT gone AND until > clock_timestamp()
FROM {s}.sp_leases WHERE task = %(n)s

-- Of a lease that nobody holds.
-- name: raise_fence
UPDATE {s}.sp_leases SET fence = %(fence)s WHERE task = %(n)s AND fence < %(fence)s

-- name: raise_fence_floor
UPDATE {s}.sp_meta SET value = %(fence)s::bigint::text WHERE key = 'fence' AND value::bigint < %(fence)s

-- Marks a number whose task is gone: what lies under it is removed by the next that looks for such stages.
-- name: leave_rest
INSERT INTO {s}.sp_stages (n, until) VALUES (%(n)s, '-infinity')

-- name: drop_task
DELETE FROM {s}.sp_tasks WHERE n = %(n)s

-- A big save on its way to the task finds its stage gone, and sends everything again.
-- name: drop_all_stages
DELETE FROM {s}.sp_stages WHERE n = %(n)s RETURNING k

-- name: ended_stages
SELECT s.k, s.n, s.until = '-infinity', EXISTS (SELECT 1 FROM {s}.sp_tasks t WHERE t.n = s.n) FROM {s}.sp_stages s
WHERE s.until < clock_timestamp() ORDER BY s.k LIMIT 100

-- name: drop_stage
DELETE FROM {s}.sp_stages WHERE k = %(k)s AND until < clock_timestamp() RETURNING k
