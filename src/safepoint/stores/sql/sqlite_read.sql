-- What is only read.

-- name: tasks
SELECT t.task, t.status, t.branch, b.head_seq, b.head_id, coalesce(c.step, 0), t.agent, coalesce(i.input, x''), t.attempts,
    t.reason, t.parent, t.raised, t.created_at, t.updated_at,
    (SELECT count(*) FROM sp_calls WHERE task = t.n AND status = 'in_doubt' AND status IN ('started', 'in_doubt', 'paused')
        AND line = coalesce(b.line, 1) AND step >= coalesce(c.step, 0)),
    (SELECT count(*) FROM sp_pauses WHERE k BETWEEN t.n << 32 AND t.n << 32 | 4294967295 AND status = 'open'
        AND line = coalesce(b.line, 1) AND step >= coalesce(c.step, 0)),
    t.checkpoints, t.n, t.writes, t.branch_sum
FROM sp_tasks t
LEFT JOIN sp_branches b ON b.task = t.n AND b.space = '' AND b.name = t.branch
LEFT JOIN sp_checkpoints c ON c.k = (t.n << 32 | b.head_seq)
LEFT JOIN sp_inputs i ON i.task = t.n

-- name: branches
SELECT b.space, b.name, b.head_seq, b.head_id, b.line, b.forked_from
FROM sp_branches b JOIN sp_tasks t ON t.n = b.task WHERE t.task = ? AND b.space = ? ORDER BY b.name

-- name: all_branches
SELECT b.space, b.name, b.head_seq, b.head_id, b.line, b.forked_from
FROM sp_branches b JOIN sp_tasks t ON t.n = b.task WHERE t.task = ? ORDER BY b.space, b.name

-- name: number
SELECT n FROM sp_tasks WHERE task = ?

-- The names in one blob, cut out one by one. Counted by LIMIT: length(?1) in there would copy the blob for each name.
-- name: level
WITH RECURSIVE cut (i) AS (VALUES (1) UNION ALL SELECT i + 16 FROM cut LIMIT ?3)
SELECT o.name, o.refs, o.data FROM cut CROSS JOIN sp_objects o ON o.task = ?2 AND o.name = substr(?1, cut.i, 16)

-- name: lease
SELECT l.fence, l.token, l.lease_id, l.locks, l.state, l.holder, l.acquired_at, l.presumed
FROM sp_leases l JOIN sp_tasks t ON t.n = l.task WHERE t.task = ?

-- name: calls
SELECT {call} FROM sp_calls
WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 AND (?2 IS NULL OR line = ?2) AND (?3 IS NULL OR step >= ?3)
ORDER BY k DESC LIMIT ?4

-- name: calls_by_no
SELECT {call} FROM sp_calls
WHERE k IN (SELECT ?1 << 32 | value FROM json_each(?5)) AND (?2 IS NULL OR line = ?2) AND (?3 IS NULL OR step >= ?3)
ORDER BY k DESC LIMIT ?4

-- name: headers
SELECT {header} FROM sp_checkpoints
WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | ?2 AND (?3 IS NULL OR space = ?3) AND (?4 IS NULL OR branch = ?4) ORDER BY k DESC LIMIT ?5

-- name: headers_of_space
SELECT {header} FROM sp_checkpoints
WHERE task = ?1 AND space = ?3 AND space != '' AND seq <= ?2 AND (?4 IS NULL OR branch = ?4) ORDER BY seq DESC LIMIT ?5

-- By the index, as they are found by it.
-- name: count_writes
SELECT write_rows, (SELECT count(*) FROM sp_writes INDEXED BY sp_writes_key WHERE task = ?1) FROM sp_tasks WHERE n = ?1

-- What is compared with the witness and with the counts.

-- name: at
SELECT n, task, created_at, writes, branch, branch_sum, checkpoints, calls, pauses, branches_sum FROM sp_tasks WHERE task = ?

-- name: head
SELECT head_seq, head_id FROM sp_branches WHERE task = ? AND space = ? AND name = ?

-- name: names_of_branches
SELECT space, name FROM sp_branches WHERE task = ?

-- name: of_branch
SELECT 1 FROM sp_checkpoints
WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 AND space = ?2 AND (?3 IS NULL OR branch = ?3) LIMIT 1

-- name: of_id
SELECT 1 FROM sp_checkpoints NOT INDEXED
WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 AND space = ?2 AND id = ?3 LIMIT 1

-- name: seq_of_id
SELECT seq FROM sp_checkpoints WHERE task = ? AND space = ? AND id = ?

-- Rows are counted one after the other, since a seek may be led astray by a damaged page, and each once, since it may lead in
-- circles. How many there are, and whether one has this number.
-- name: count_checkpoints
SELECT count(DISTINCT seq), coalesce(max(seq = ?2), 0) FROM sp_checkpoints
WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 AND task = ?1

-- name: count_headers
SELECT count(DISTINCT seq), count(DISTINCT iif(seq <= ?2 AND (?3 IS NULL OR space = ?3 OR typeof(space) != 'text')
    AND (?4 IS NULL OR branch = ?4 OR typeof(branch) != 'text'), seq, NULL))
FROM sp_checkpoints WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 AND task = ?1

-- name: count_calls
SELECT count(DISTINCT no), count(DISTINCT iif((?2 IS NULL OR line = ?2) AND (?3 IS NULL OR step >= ?3), no, NULL))
FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 AND task = ?1

-- name: slot
SELECT t.created_at, t.writes, t.position, coalesce(l.fence, 0), t.next_seq, t.next_call, t.next_pause, t.next_line
FROM sp_tasks t LEFT JOIN sp_leases l ON l.task = t.n WHERE t.n = ?

-- name: tasks_there
SELECT (SELECT value FROM sp_meta WHERE key = 'tasks'), (SELECT count(*) FROM sp_tasks)

-- name: accept_numbers
UPDATE sp_tasks SET writes = max(writes, ?2) + 1, position = max(position, ?3), next_seq = max(next_seq, ?4),
    next_call = max(next_call, ?5), next_pause = max(next_pause, ?6), next_line = max(next_line, ?7)
WHERE n = ?1

-- name: accept_older
INSERT INTO sp_meta (key, value) VALUES ('older ' || ?1, ?2) ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)

-- name: older
SELECT m.value FROM sp_tasks t JOIN sp_meta m ON m.key = 'older ' || t.n WHERE t.task = ?

-- name: accept_fence
UPDATE sp_leases SET fence = max(fence, ?2) WHERE task = ?1

-- name: accept_fence_floor
UPDATE sp_meta SET value = max(value, ?) WHERE key = 'fence'

-- name: accept_last
UPDATE sp_meta SET value = max(value, ?) WHERE key = 'last'

-- name: accept_tasks
UPDATE sp_meta SET value = (SELECT count(*) FROM sp_tasks) WHERE key = 'tasks'

-- name: accept_counts
UPDATE sp_tasks SET
    checkpoints = (SELECT count(*) FROM sp_checkpoints WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),
    calls = (SELECT count(*) FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),
    pauses = (SELECT count(*) FROM sp_pauses WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),
    write_rows = (SELECT count(*) FROM sp_writes WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295),
    branch_sum = ?2, branches_sum = ?3
WHERE n = ?1
