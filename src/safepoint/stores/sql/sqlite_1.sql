-- The first schema. Every table starts with sp_, since a transactional tool's tables lie in the same file.
--
-- Tasks are known by an integer of their own. Checkpoints, calls and pauses are keyed by it and their number in one integer
-- (task << 32 | number): that is the unique index over both, without the bytes and the page of a second tree at each save.
-- Objects lie in a rowid table in the order they came; keyed by name they would be three times larger and slower.

-- schema: of these tables. nonce: counts writes that mean nothing. fence: the highest that a deleted task had, and no new one
-- gets that or a lower one.
CREATE TABLE sp_meta (key TEXT NOT NULL PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;

-- Counters live here and never run backwards, so that no number is given twice, whatever is deleted.
CREATE TABLE sp_tasks (
    n INTEGER PRIMARY KEY,
    task TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    branch TEXT NOT NULL,
    agent TEXT NOT NULL DEFAULT '',
    attempts INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    parent TEXT,
    raised BLOB NOT NULL DEFAULT x'',
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    checkpoints INTEGER NOT NULL DEFAULT 0,
    next_seq INTEGER NOT NULL DEFAULT 1,
    next_call INTEGER NOT NULL DEFAULT 1,
    next_pause INTEGER NOT NULL DEFAULT 1,
    next_line INTEGER NOT NULL DEFAULT 1,
    position INTEGER NOT NULL DEFAULT 1,
    sweeps INTEGER NOT NULL DEFAULT 0,
    last_commit TEXT NOT NULL DEFAULT ''
) STRICT;

-- Apart from the task's row, which each commit rewrites: an input may be large.
CREATE TABLE sp_inputs (task INTEGER PRIMARY KEY, input BLOB NOT NULL) STRICT;

-- root and refs last: listings do not read them.
CREATE TABLE sp_checkpoints (
    k INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    id TEXT NOT NULL,
    space TEXT NOT NULL,
    branch TEXT NOT NULL,
    parent_seq INTEGER,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,
    label TEXT,
    created_at INTEGER NOT NULL,
    format INTEGER NOT NULL,
    schema INTEGER NOT NULL,
    size INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    digest BLOB NOT NULL,
    seal BLOB NOT NULL,
    metadata BLOB NOT NULL,
    metrics BLOB NOT NULL,
    refs BLOB NOT NULL,
    root BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX sp_checkpoints_id ON sp_checkpoints (task, space, id);
-- Only adapters use other spaces; a task's own checkpoints pay nothing for this one.
CREATE UNIQUE INDEX sp_checkpoints_space ON sp_checkpoints (task, space, seq) WHERE space != '';

CREATE TABLE sp_branches (
    task INTEGER NOT NULL,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    head_seq INTEGER NOT NULL,
    head_id TEXT NOT NULL,
    line INTEGER NOT NULL,
    forked_from INTEGER,
    PRIMARY KEY (task, space, name)
) STRICT, WITHOUT ROWID;

-- stage: the big save that sent the object ahead of its commit; it means nothing once that save is no longer in sp_stages.
CREATE TABLE sp_objects (
    k INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    stage INTEGER,
    name BLOB NOT NULL,
    refs BLOB NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX sp_objects_name ON sp_objects (task, name);

-- byte: locked in the -locks file by the process that is saving; free means that it died, and its objects are garbage.
CREATE TABLE sp_stages (
    k INTEGER PRIMARY KEY AUTOINCREMENT,
    n INTEGER NOT NULL,
    task TEXT NOT NULL,
    byte INTEGER NOT NULL
) STRICT;

CREATE TABLE sp_calls (
    k INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    no INTEGER NOT NULL,
    line INTEGER NOT NULL,
    step INTEGER NOT NULL,
    scope INTEGER NOT NULL,
    ident BLOB NOT NULL,
    tool TEXT NOT NULL,
    effect TEXT NOT NULL,
    call_id TEXT,
    idempotency_key TEXT NOT NULL,
    op_key BLOB,
    status TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    base_seq INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    finished_at INTEGER,
    asked INTEGER NOT NULL,
    began INTEGER NOT NULL,
    ended INTEGER,
    not_done INTEGER NOT NULL,
    superseded INTEGER NOT NULL,
    reason TEXT NOT NULL,
    version INTEGER NOT NULL,
    seal BLOB NOT NULL,
    policy BLOB NOT NULL,
    args_refs BLOB NOT NULL,
    result_refs BLOB NOT NULL,
    error BLOB,
    model BLOB,
    args BLOB NOT NULL,
    result BLOB
) STRICT;
-- Small: only the few that are open. They count for the task list and keep what they stand on.
CREATE INDEX sp_calls_open ON sp_calls (task, status) WHERE status IN ('started', 'in_doubt', 'paused');

-- An adapter's values against (space, checkpoint, writer, index), maybe before that checkpoint exists: so no foreign key.
CREATE TABLE sp_writes (
    task INTEGER NOT NULL,
    space TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    writer TEXT NOT NULL,
    idx INTEGER NOT NULL,
    channel TEXT NOT NULL,
    kind TEXT NOT NULL,
    path TEXT NOT NULL DEFAULT '',
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX sp_writes_key ON sp_writes (task, space, checkpoint, writer, idx);

CREATE TABLE sp_pauses (
    k INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    no INTEGER NOT NULL,
    line INTEGER NOT NULL,
    step INTEGER NOT NULL,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    occurrence INTEGER NOT NULL,
    call_no INTEGER,
    base_seq INTEGER NOT NULL,
    status TEXT NOT NULL,
    asked_at INTEGER NOT NULL,
    answered_at INTEGER,
    version INTEGER NOT NULL,
    seal BLOB NOT NULL,
    question BLOB NOT NULL,
    answer BLOB
) STRICT;

-- lease_id: the byte that the holder has locked; locks: the name inside the -locks file that it is locked in.
CREATE TABLE sp_leases (
    task INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    token TEXT NOT NULL,
    lease_id INTEGER NOT NULL,
    locks TEXT NOT NULL,
    state TEXT NOT NULL,
    holder BLOB NOT NULL,
    acquired_at INTEGER NOT NULL,
    presumed INTEGER NOT NULL
) STRICT;

CREATE TABLE sp_outbox (
    k INTEGER PRIMARY KEY AUTOINCREMENT,
    task INTEGER NOT NULL,
    key TEXT NOT NULL,
    status TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX sp_outbox_key ON sp_outbox (task, key);
