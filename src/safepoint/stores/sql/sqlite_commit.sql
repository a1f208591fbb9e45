-- What commit, acquire and release write. One look, then one statement per row.

-- Three statements and not one with joins: SQLite prepares such a one anew at each call, which takes five times as long.
-- name: look
SELECT n, next_seq, next_call, next_pause, next_line, next_write, position, branch, branches_sum, last_commit, created_at,
    writes
FROM sp_tasks WHERE task = ?

-- name: look_lease
SELECT fence, token, lease_id, locks, state, holder, acquired_at FROM sp_leases WHERE task = ?

-- name: look_branch
SELECT head_seq, head_id FROM sp_branches WHERE task = ? AND space = ? AND name = ?

-- name: same_id
SELECT seq, branch, parent_seq, digest FROM sp_checkpoints WHERE task = ? AND space = ? AND id = ?

-- name: id_at
SELECT id FROM sp_checkpoints WHERE k = ?

-- name: id_and_space_at
SELECT id, space FROM sp_checkpoints WHERE k = ?

-- name: has_branch
SELECT 1 FROM sp_branches WHERE task = ? AND space = '' LIMIT 1

-- name: new_task
INSERT INTO sp_tasks (n, task, status, branch, created_at, updated_at, branch_sum)
VALUES (
    coalesce(
        (SELECT n FROM sp_stages WHERE task = ?1 AND n NOT IN (SELECT n FROM sp_tasks) LIMIT 1),
        1 + max((SELECT value FROM sp_meta WHERE key = 'last'), (SELECT coalesce(max(n), 0) FROM sp_stages))
    ),
    ?1, 'idle', 'main', ?2, ?2, ?3)
RETURNING n

-- name: set_task
UPDATE sp_tasks SET next_seq = ?2, next_call = ?3, next_pause = ?4, next_line = ?5, position = ?6, branch = ?7,
    checkpoints = checkpoints + ?8, last_commit = ?9, updated_at = ?10, branch_sum = ?11,
    writes = writes + 1, next_write = ?12, branches_sum = ?13
WHERE n = ?1

-- name: patch_task
UPDATE sp_tasks SET status = coalesce(?2, status), agent = coalesce(?3, agent), reason = coalesce(?4, reason),
    raised = coalesce(?5, raised), parent = coalesce(?6, parent), branch = coalesce(?7, branch),
    branch_sum = iif(?7 IS NULL, branch_sum, ?8)
WHERE n = ?1

-- name: guarded
DELETE FROM sp_meta WHERE key = 'older ' || ?

-- name: set_input
INSERT OR REPLACE INTO sp_inputs (task, input) VALUES (?, ?)

-- name: object
INSERT INTO sp_objects (task, stage, name, refs, data) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (task, name) DO UPDATE SET refs = excluded.refs, data = excluded.data
WHERE data IS NOT excluded.data OR refs IS NOT excluded.refs

-- name: new_branch
INSERT INTO sp_branches (task, space, name, head_seq, head_id, line, forked_from) VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: move_branch
UPDATE sp_branches SET head_seq = ?4, head_id = ?5 WHERE task = ?1 AND space = ?2 AND name = ?3

-- name: drop_branch
DELETE FROM sp_branches WHERE task = ? AND space = ? AND name = ?

-- name: drop_write
DELETE FROM sp_writes WHERE task = ? AND space = ? AND checkpoint = ? AND writer = ? AND idx = ?

-- name: lease
SELECT t.n, l.fence, l.token, l.lease_id, l.locks, l.state, l.holder, l.acquired_at, l.presumed, t.created_at, t.writes
FROM sp_tasks t LEFT JOIN sp_leases l ON l.task = t.n WHERE t.task = ?

-- name: take
INSERT OR REPLACE INTO sp_leases (task, fence, token, lease_id, locks, state, holder, acquired_at, presumed)
VALUES (?, ?, ?, ?, ?, 'held', ?, ?, ?)

-- name: fence_floor
SELECT value FROM sp_meta WHERE key = 'fence'

-- name: taken
UPDATE sp_tasks SET status = 'running', attempts = attempts + 1, updated_at = ?, writes = writes + 1 WHERE n = ?

-- name: give_back
UPDATE sp_leases SET state = 'released' WHERE task = ? AND fence = ? AND token = ?

-- name: touch
UPDATE sp_tasks SET updated_at = ?, writes = writes + 1 WHERE n = ?

-- name: nonce
UPDATE sp_meta SET value = value + 1 WHERE key = 'nonce'

-- name: mark
UPDATE sp_tasks SET last_commit = ? WHERE n = ?

-- name: marked
SELECT last_commit FROM sp_tasks WHERE n = ?

-- name: new_stage
INSERT INTO sp_stages (n, task, byte)
VALUES (
    coalesce(
        (SELECT n FROM sp_tasks WHERE task = ?1),
        (SELECT n FROM sp_stages WHERE task = ?1 AND n NOT IN (SELECT n FROM sp_tasks) LIMIT 1),
        1 + max((SELECT value FROM sp_meta WHERE key = 'last'), (SELECT coalesce(max(n), 0) FROM sp_stages))
    ),
    ?1, ?2)
RETURNING k, n

-- name: stages
SELECT k, n, task, byte FROM sp_stages

-- name: end_stage
DELETE FROM sp_stages WHERE k = ?

-- name: sweeps
SELECT n, sweeps FROM sp_tasks WHERE task = ?

-- name: staged
SELECT t.sweeps FROM sp_tasks t JOIN sp_stages s ON s.n = t.n WHERE t.n = ? AND s.k = ?
