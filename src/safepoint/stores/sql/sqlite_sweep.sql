-- What removes.

-- name: checkpoints
SELECT seq, space, pinned, refs, length(root) + length(metadata) + length(metrics) + length(refs) + length(id), id
FROM sp_checkpoints WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: branches
SELECT b.head_seq, b.forked_from, b.line, coalesce(c.step, 0), b.space = '' AND b.name = t.branch
FROM sp_branches b JOIN sp_tasks t ON t.n = b.task LEFT JOIN sp_checkpoints c ON c.k = (b.task << 32 | b.head_seq) WHERE b.task = ?

-- name: call_bases
SELECT no, base_seq, line, step, status, fence,
    length(args) + length(args_refs) + coalesce(length(result), 0) + length(result_refs) + length(policy)
FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: call_refs
SELECT base_seq, args_refs, result_refs FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: pauses
SELECT no, base_seq, line, step, status FROM sp_pauses WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: writes
SELECT k, space, checkpoint, refs,
    length(data) + length(refs) + length(space) + length(checkpoint) + length(writer) + length(path)
FROM sp_writes WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: objects
SELECT k, name, refs, stage, length(data) FROM sp_objects WHERE task = ?

-- name: drop_checkpoint
DELETE FROM sp_checkpoints WHERE k = ?

-- name: drop_call
DELETE FROM sp_calls WHERE k = ?

-- name: drop_pause
DELETE FROM sp_pauses WHERE k = ?

-- name: drop_write
DELETE FROM sp_writes WHERE k = ?

-- name: drop_object
DELETE FROM sp_objects WHERE k = ?

-- name: swept
UPDATE sp_tasks SET checkpoints = checkpoints - ?2, sweeps = sweeps + 1 WHERE n = ?1

-- name: lease
SELECT fence, state, lease_id, locks, holder, acquired_at FROM sp_leases WHERE task = ?

-- name: hand_on_lease
UPDATE sp_leases SET task = ?2, fence = max(fence, ?3) WHERE task = ?1

-- name: hand_on_older
UPDATE sp_meta SET key = 'older ' || ?2 WHERE key = 'older ' || ?1

-- name: raise_fence_floor
UPDATE sp_meta SET value = max(value, ?) WHERE key = 'fence'

-- name: pin
UPDATE sp_checkpoints SET pinned = ?2 WHERE k = ?1 AND space = ?3

-- How much a sweep would read, up to a number.
-- name: amount
SELECT (SELECT count(*) FROM (SELECT 1 FROM sp_objects WHERE task = ?1 LIMIT ?2))
    + (SELECT count(*) FROM (SELECT 1 FROM sp_checkpoints WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 LIMIT ?2))
    + (SELECT count(*) FROM (SELECT 1 FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 LIMIT ?2))
    + (SELECT count(*) FROM (SELECT 1 FROM sp_writes WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295 LIMIT ?2))

-- name: live_objects
SELECT count(*) FROM sp_objects WHERE task = (SELECT n FROM sp_tasks WHERE task = ?)

-- For large sweeps. Those with a LIMIT are read in pages, by their first column.
-- name: checkpoint_sizes
SELECT k, seq, space, pinned, length(root) + length(metadata) + length(metrics) + length(refs) + length(id), id
FROM sp_checkpoints WHERE k > ?1 AND k <= ?2 ORDER BY k LIMIT ?3

-- name: roots
SELECT k, seq, refs FROM sp_checkpoints WHERE k > ?1 AND k <= ?2 ORDER BY k LIMIT ?3

-- name: call_roots
SELECT k, no, version, base_seq, args_refs, result_refs FROM sp_calls WHERE k > ?1 AND k <= ?2 ORDER BY k LIMIT ?3

-- name: write_roots
SELECT k, space, checkpoint, refs FROM sp_writes WHERE k > ?1 AND k <= ?2 ORDER BY k LIMIT ?3

-- name: write_sizes
SELECT k, checkpoint, length(data) + length(refs) + length(space) + length(checkpoint) + length(writer) + length(path)
FROM sp_writes WHERE k > ?1 AND k <= ?2 AND space = ?3 ORDER BY k LIMIT ?4

-- name: writes_of
SELECT k, length(data) + length(refs) + length(space) + length(checkpoint) + length(writer) + length(path)
FROM sp_writes WHERE task = ? AND space = ? AND checkpoint = ?

-- name: object_sizes
SELECT name, refs, stage, length(data), k FROM sp_objects WHERE task = ?2 AND name > ?1 ORDER BY name LIMIT ?3

-- name: call_versions
SELECT no, version FROM sp_calls WHERE k BETWEEN ?1 << 32 AND ?1 << 32 | 4294967295

-- name: newer_bases
SELECT base_seq FROM sp_calls WHERE task = ?1 AND status IN ('started', 'in_doubt', 'paused')
UNION SELECT base_seq FROM sp_calls WHERE k BETWEEN ?2 AND ?1 << 32 | 4294967295
UNION SELECT base_seq FROM sp_pauses WHERE k BETWEEN ?3 AND ?1 << 32 | 4294967295

-- name: still_there
SELECT seq FROM sp_checkpoints WHERE k = ? AND NOT pinned

-- name: there
SELECT value FROM json_each(?2) JOIN sp_checkpoints ON k = (?1 << 32 | value)

-- name: object_at
SELECT k, stage FROM sp_objects WHERE task = ? AND name = ?

-- name: level_refs
WITH RECURSIVE cut (i) AS (VALUES (1) UNION ALL SELECT i + 16 FROM cut LIMIT ?3)
SELECT o.name, o.refs FROM cut CROSS JOIN sp_objects o ON o.task = ?2 AND o.name = substr(?1, cut.i, 16)

-- name: dropped
UPDATE sp_tasks SET checkpoints = checkpoints - ?2 WHERE n = ?1
