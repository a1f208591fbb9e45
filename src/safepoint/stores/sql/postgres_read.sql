-- What the PostgreSQL store reads, and the lease statements that are no functions.

-- name: tasks
SELECT t.task, t.status, t.branch, b.head_seq, b.head_id, coalesce(c.step, 0), t.agent, coalesce(i.input, ''::bytea), t.attempts,
    t.reason, t.parent, t.raised, t.created_at, t.updated_at,
    (SELECT count(*) FROM {s}.sp_calls x WHERE x.task = t.n AND x.status = 'in_doubt' AND x.status IN ('started', 'in_doubt', 'paused')
        AND x.line = coalesce(b.line, 1) AND x.step >= coalesce(c.step, 0)),
    (SELECT count(*) FROM {s}.sp_pauses x WHERE x.task = t.n AND x.status = 'open'
        AND x.line = coalesce(b.line, 1) AND x.step >= coalesce(c.step, 0)),
    t.checkpoints
FROM {s}.sp_tasks t
LEFT JOIN {s}.sp_branches b ON b.task = t.n AND b.space = '' AND b.name = t.branch
LEFT JOIN {s}.sp_checkpoints c ON c.task = t.n AND c.seq = b.head_seq
LEFT JOIN {s}.sp_inputs i ON i.task = t.n

-- name: branches
SELECT b.space, b.name, b.head_seq, b.head_id, b.line, b.forked_from
FROM {s}.sp_branches b JOIN {s}.sp_tasks t ON t.n = b.task WHERE t.task = %s

-- A checkpoint with the number of its task and how many objects that has, of how many bytes: by that it is decided how those that
-- are needed are read. They are not counted beyond what decides.
-- name: by_seq
SELECT {checkpoint}, t.n, x.*
FROM {s}.sp_tasks t JOIN {s}.sp_checkpoints c ON c.task = t.n
CROSS JOIN LATERAL (
    SELECT count(*), coalesce(sum(octet_length(o.data)), 0)::bigint FROM (
        SELECT p.data FROM {s}.sp_objects p WHERE p.task = t.n AND c.refs <> ''::bytea LIMIT c.size / 64 + 1000
    ) o
) x
WHERE t.task = %s AND c.seq = %s

-- name: by_id
SELECT {checkpoint}, t.n, x.*
FROM {s}.sp_tasks t JOIN {s}.sp_checkpoints c ON c.task = t.n
CROSS JOIN LATERAL (
    SELECT count(*), coalesce(sum(octet_length(o.data)), 0)::bigint FROM (
        SELECT p.data FROM {s}.sp_objects p WHERE p.task = t.n AND c.refs <> ''::bytea LIMIT c.size / 64 + 1000
    ) o
) x
WHERE t.task = %s AND c.space = %s AND c.id = %s

-- The head of a branch, or of the current one; the last two columns are where the branch says that it stands.
-- name: by_branch
SELECT {checkpoint}, t.n, x.*, b.head_seq, b.head_id
FROM {s}.sp_tasks t JOIN {s}.sp_branches b ON b.task = t.n AND b.space = %s AND b.name = coalesce(%s, t.branch)
LEFT JOIN {s}.sp_checkpoints c ON c.task = t.n AND c.seq = b.head_seq
CROSS JOIN LATERAL (
    SELECT count(*), coalesce(sum(octet_length(o.data)), 0)::bigint FROM (
        SELECT p.data FROM {s}.sp_objects p WHERE p.task = t.n AND c.refs <> ''::bytea LIMIT c.size / 64 + 1000
    ) o
) x
WHERE t.task = %s

-- Whether a task has a checkpoint of that branch: then the branch must have a head, unless one was dropped.
-- name: of_branch
SELECT 1 FROM {s}.sp_tasks t JOIN {s}.sp_checkpoints c ON c.task = t.n
WHERE t.task = %s AND NOT t.dropped AND c.space = %s AND c.branch = coalesce(%s, c.branch) LIMIT 1

-- name: objects
SELECT name, refs, data FROM {s}.sp_objects WHERE task = %s

-- OFFSET 0 keeps the lookups what they are, one by one: of a table that it knows little of, or too well, the server takes all
-- objects of the task in hand to find a few.
-- name: reached
WITH RECURSIVE r (name) AS (
    SELECT unnest(%s::bytea[])
    UNION
    SELECT substr(o.refs, x, 16) FROM r
        CROSS JOIN LATERAL (SELECT p.refs FROM {s}.sp_objects p WHERE p.task = %s AND p.name = r.name OFFSET 0) o
        CROSS JOIN LATERAL generate_series(1, octet_length(o.refs), 16) x
)
SELECT o.* FROM r
CROSS JOIN LATERAL (SELECT p.name, p.refs, p.data FROM {s}.sp_objects p WHERE p.task = %s AND p.name = r.name OFFSET 0) o

-- name: lease
SELECT l.fence, l.token, l.state, l.holder, l.process, l.acquired_at, l.presumed, NOT l.gone AND l.until > clock_timestamp(),
    (extract(epoch FROM l.until) * 1000000)::bigint
FROM {s}.sp_leases l JOIN {s}.sp_tasks t ON t.n = l.task WHERE t.task = %s

-- name: calls
SELECT {call}, t.n FROM {s}.sp_tasks t JOIN {s}.sp_calls c ON c.task = t.n
WHERE t.task = %s

-- name: headers
SELECT {header} FROM {s}.sp_tasks t JOIN {s}.sp_checkpoints c ON c.task = t.n
WHERE t.task = %s

-- name: whole
SELECT {checkpoint} FROM {s}.sp_tasks t JOIN {s}.sp_checkpoints c ON c.task = t.n
WHERE t.task = %s

-- name: pauses
SELECT {pause} FROM {s}.sp_tasks t JOIN {s}.sp_pauses c ON c.task = t.n WHERE t.task = %s ORDER BY c.no

-- name: writes
SELECT {write}, t.n FROM {s}.sp_tasks t JOIN {s}.sp_writes c ON c.task = t.n
WHERE t.task = %s

-- name: renew
UPDATE {s}.sp_leases l SET until = clock_timestamp() + %s * interval '1 second'
FROM unnest(%s::text[], %s::bigint[], %s::text[]) c (task, fence, token), {s}.sp_tasks t
WHERE t.task = c.task AND l.task = t.n AND l.fence = c.fence AND l.token = c.token AND l.state = 'held' AND NOT l.gone
RETURNING l.token

-- name: forsake
UPDATE {s}.sp_leases l SET gone = true
FROM unnest(%s::text[], %s::bigint[], %s::text[]) c (task, fence, token), {s}.sp_tasks t
WHERE t.task = c.task AND l.task = t.n AND l.fence = c.fence AND l.token = c.token AND l.state = 'held'
