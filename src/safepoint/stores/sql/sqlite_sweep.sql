-- What removes.

-- name: checkpoints
SELECT seq, space, pinned, refs, length(root) + length(metadata) + length(metrics) + length(refs) + length(id)
FROM sp_checkpoints WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: branches
SELECT b.head_seq, b.forked_from, b.line, coalesce(c.step, 0)
FROM sp_branches b LEFT JOIN sp_checkpoints c ON c.k = (b.task << 32 | b.head_seq) WHERE b.task = ?

-- name: calls
SELECT no, base_seq, line, step, status, fence, args_refs, result_refs,
    length(args) + length(args_refs) + coalesce(length(result), 0) + length(result_refs) + length(policy)
FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: pauses
SELECT no, base_seq, line, step, status FROM sp_pauses WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: objects
SELECT k, name, refs, stage, length(data) FROM sp_objects WHERE task = ?

-- name: drop_checkpoint
DELETE FROM sp_checkpoints WHERE k = ?

-- name: drop_call
DELETE FROM sp_calls WHERE k = ?

-- name: drop_pause
DELETE FROM sp_pauses WHERE k = ?

-- name: drop_object
DELETE FROM sp_objects WHERE k = ?

-- name: swept
UPDATE sp_tasks SET checkpoints = checkpoints - ?2, sweeps = sweeps + 1 WHERE n = ?1

-- name: lease
SELECT fence, state, lease_id, locks, holder, acquired_at FROM sp_leases WHERE task = ?

-- name: raise_fence_floor
UPDATE sp_meta SET value = max(value, ?) WHERE key = 'fence'

-- name: pin
UPDATE sp_checkpoints SET pinned = ?2 WHERE k = ?1 AND space = ?3
