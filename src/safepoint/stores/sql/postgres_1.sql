-- The tables of the PostgreSQL store, schema 2 (1 was never released). {s} is the name of the schema they lie in; every table starts with sp_ too, as
-- tables of transactional tools may lie beside them. What each means is told in sqlite_1.sql; what differs is told here.
--
-- Texts are compared byte by byte ("C"): that is the order of code points, in which tasks are listed. Payload is stored out of
-- line and not compressed: objects are read back as they are, and compressing them would cost more than it saves.

CREATE TABLE {s}.sp_meta (key text COLLATE "C" PRIMARY KEY, value text COLLATE "C" NOT NULL);

-- Counters live here and never run backwards. They hold the last number that was given.
-- recent: the last commits without a checkpoint that landed, as last_call/last_pause/id, where the numbers are those before it. A
-- request that was sent twice, since nobody knew whether the first had arrived, may arrive twice.
-- dropped: a branch was dropped whose checkpoints may still be there: one that has checkpoints and no row is no damage then.
-- sweeps: rises with each; a big save that was staged before it sends all again.
CREATE TABLE {s}.sp_tasks (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task text COLLATE "C" NOT NULL UNIQUE,
    status text COLLATE "C" NOT NULL,
    branch text COLLATE "C" NOT NULL,
    agent text COLLATE "C" NOT NULL DEFAULT '',
    attempts bigint NOT NULL DEFAULT 0,
    reason text COLLATE "C" NOT NULL DEFAULT '',
    parent text COLLATE "C",
    raised bytea NOT NULL DEFAULT '',
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    checkpoints bigint NOT NULL DEFAULT 0,
    last_seq bigint NOT NULL DEFAULT 0,
    last_call bigint NOT NULL DEFAULT 0,
    last_pause bigint NOT NULL DEFAULT 0,
    last_line bigint NOT NULL DEFAULT 0,
    last_position bigint NOT NULL DEFAULT 0,
    sweeps bigint NOT NULL DEFAULT 0,
    dropped boolean NOT NULL DEFAULT false,
    recent text[] COLLATE "C" NOT NULL DEFAULT '{{}}'
) WITH (fillfactor = 50);

CREATE TABLE {s}.sp_inputs (task bigint PRIMARY KEY, input bytea NOT NULL);
ALTER TABLE {s}.sp_inputs ALTER input SET STORAGE EXTERNAL;

CREATE TABLE {s}.sp_checkpoints (
    task bigint NOT NULL,
    seq bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    space text COLLATE "C" NOT NULL,
    branch text COLLATE "C" NOT NULL,
    parent_seq bigint,
    step bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    label text COLLATE "C",
    created_at bigint NOT NULL,
    format bigint NOT NULL,
    schema bigint NOT NULL,
    size bigint NOT NULL,
    pinned boolean NOT NULL,
    digest bytea NOT NULL,
    seal bytea NOT NULL,
    metadata bytea NOT NULL,
    metrics bytea NOT NULL,
    refs bytea NOT NULL,
    root bytea NOT NULL,
    PRIMARY KEY (task, seq)
);
ALTER TABLE {s}.sp_checkpoints ALTER refs SET STORAGE EXTERNAL, ALTER root SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX sp_checkpoints_id ON {s}.sp_checkpoints (task, space, id);
CREATE UNIQUE INDEX sp_checkpoints_space ON {s}.sp_checkpoints (task, space, seq) WHERE space <> '';

CREATE TABLE {s}.sp_branches (
    task bigint NOT NULL,
    space text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    head_seq bigint NOT NULL,
    head_id text COLLATE "C" NOT NULL,
    line bigint NOT NULL,
    forked_from bigint,
    PRIMARY KEY (task, space, name)
) WITH (fillfactor = 50);

CREATE TABLE {s}.sp_objects (
    task bigint NOT NULL,
    name bytea NOT NULL,
    stage bigint,
    refs bytea NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (task, name)
);
ALTER TABLE {s}.sp_objects ALTER refs SET STORAGE EXTERNAL, ALTER data SET STORAGE EXTERNAL;

-- until: server time up to which the big save is believed to go on; later its objects are garbage.
CREATE TABLE {s}.sp_stages (
    k bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    n bigint NOT NULL,
    until timestamptz NOT NULL
);

CREATE TABLE {s}.sp_calls (
    task bigint NOT NULL,
    no bigint NOT NULL,
    line bigint NOT NULL,
    step bigint NOT NULL,
    scope bigint NOT NULL,
    ident bytea NOT NULL,
    tool text COLLATE "C" NOT NULL,
    effect text COLLATE "C" NOT NULL,
    call_id text COLLATE "C",
    idempotency_key text COLLATE "C" NOT NULL,
    op_key bytea,
    status text COLLATE "C" NOT NULL,
    attempts bigint NOT NULL,
    fence bigint NOT NULL,
    base_seq bigint NOT NULL,
    started_at bigint NOT NULL,
    finished_at bigint,
    asked bigint NOT NULL,
    began bigint NOT NULL,
    ended bigint,
    not_done boolean NOT NULL,
    superseded boolean NOT NULL,
    reason text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    seal bytea NOT NULL,
    policy bytea NOT NULL,
    args_refs bytea NOT NULL,
    result_refs bytea NOT NULL,
    error bytea,
    model bytea,
    args bytea NOT NULL,
    result bytea,
    PRIMARY KEY (task, no)
) WITH (fillfactor = 80);
ALTER TABLE {s}.sp_calls ALTER args SET STORAGE EXTERNAL, ALTER result SET STORAGE EXTERNAL,
    ALTER args_refs SET STORAGE EXTERNAL, ALTER result_refs SET STORAGE EXTERNAL;
CREATE INDEX sp_calls_open ON {s}.sp_calls (task, status) WHERE status IN ('started', 'in_doubt', 'paused');

-- k: rises with each write to the row. As it is drawn under the task's lock, a sweep finds by it what came after its look.
CREATE TABLE {s}.sp_writes (
    task bigint NOT NULL,
    space text COLLATE "C" NOT NULL,
    checkpoint text COLLATE "C" NOT NULL,
    writer text COLLATE "C" NOT NULL,
    idx bigint NOT NULL,
    k bigint GENERATED ALWAYS AS IDENTITY,
    path text COLLATE "C" NOT NULL,
    seal bytea NOT NULL,
    refs bytea NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (task, space, checkpoint, writer, idx)
);
ALTER TABLE {s}.sp_writes ALTER refs SET STORAGE EXTERNAL, ALTER data SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX sp_writes_roots ON {s}.sp_writes (task, k) WHERE refs <> '';

CREATE TABLE {s}.sp_pauses (
    task bigint NOT NULL,
    no bigint NOT NULL,
    line bigint NOT NULL,
    step bigint NOT NULL,
    space text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    occurrence bigint NOT NULL,
    call_no bigint,
    base_seq bigint NOT NULL,
    status text COLLATE "C" NOT NULL,
    asked_at bigint NOT NULL,
    answered_at bigint,
    version bigint NOT NULL,
    seal bytea NOT NULL,
    question bytea NOT NULL,
    answer bytea,
    PRIMARY KEY (task, no)
);

-- Apart from the task's row, which a commit locks: beats must not wait for it. until: by the server's clock. process: who holds it,
-- for those on the same host; see stores/renewing.py. gone: the holder has said that nobody is behind it any more. previous: how
-- the holder before it ended, to be told again if the answer was lost. recent: the last tokens; a request for a lease may arrive twice,
-- the second time when its lease is long over and nobody waits for it any more.
CREATE TABLE {s}.sp_leases (
    task bigint PRIMARY KEY,
    fence bigint NOT NULL,
    token text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    gone boolean NOT NULL DEFAULT false,
    until timestamptz NOT NULL,
    process bytea NOT NULL,
    holder bytea NOT NULL,
    acquired_at bigint NOT NULL,
    presumed bigint NOT NULL,
    previous text COLLATE "C" NOT NULL,
    recent text[] COLLATE "C" NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE {s}.sp_outbox (
    k bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    attempts bigint NOT NULL DEFAULT 0,
    created_at bigint NOT NULL,
    data bytea NOT NULL,
    UNIQUE (task, key)
);

CREATE TABLE {s}.sp_quarantine (
    k bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    task text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    why text COLLATE "C" NOT NULL,
    at bigint NOT NULL,
    data bytea NOT NULL
);

-- schema: of these tables. fence: the highest that a deleted task had, and no new one gets that or a lower one.
INSERT INTO {s}.sp_meta (key, value) VALUES ('schema', '2'), ('fence', '0');
