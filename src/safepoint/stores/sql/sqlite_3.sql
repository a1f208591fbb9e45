-- The step from schema 2 to 3. What adapters record against checkpoints: the table that was there before was never written to.
--
-- Keyed as calls are (task << 32 | number), so that a sweep reads a task's rows where they lie together. The number is given in
-- order and none comes twice; a row that replaces another gets one of its own. So what was recorded since a look at the task
-- are the rows from a number on.
DROP TABLE sp_writes;

-- Against (space, checkpoint, writer, index), maybe before that checkpoint exists: so no foreign key.
CREATE TABLE sp_writes (
    k INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    space TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    writer TEXT NOT NULL,
    idx INTEGER NOT NULL,
    path TEXT NOT NULL,
    seal BLOB NOT NULL,
    refs BLOB NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX sp_writes_key ON sp_writes (task, space, checkpoint, writer, idx);

ALTER TABLE sp_tasks ADD COLUMN next_write INTEGER NOT NULL DEFAULT 1;
-- How many rows there should be, as with calls and pauses. (The column "writes" counts something else.)
ALTER TABLE sp_tasks ADD COLUMN write_rows INTEGER DEFAULT 0;

-- Sum of the CRC-32 of task, space and name of its branches: a branch that is not there was dropped or never made, or else its
-- row is lost, or goes by another name. NULL: not known.
ALTER TABLE sp_tasks ADD COLUMN branches_sum INTEGER DEFAULT 0;

-- After: of rows whose key is taken, none comes.
CREATE TRIGGER sp_writes_more AFTER INSERT ON sp_writes
BEGIN UPDATE sp_tasks SET write_rows = write_rows + 1 WHERE n = NEW.task; END;
CREATE TRIGGER sp_writes_less AFTER DELETE ON sp_writes
BEGIN UPDATE sp_tasks SET write_rows = write_rows - 1 WHERE n = OLD.task; END;
