-- The step from schema 1 to 2. A new file takes both, so that there is one truth; see stores/sqlite_schema.py.
--
-- How many rows there should be. A damaged page can lose rows without a word, and a lost call row would be a call that is
-- made again: what reads all rows of a kind compares. Counted by triggers, so that a process of an older safepoint that has
-- the file open meanwhile counts too. NULL: not known, since what was to be counted was damaged already.
ALTER TABLE sp_tasks ADD COLUMN calls INTEGER DEFAULT 0;
ALTER TABLE sp_tasks ADD COLUMN pauses INTEGER DEFAULT 0;
-- CRC-32 of task and current branch: a branch by another name may exist, and be taken for the current one. NULL: not known.
ALTER TABLE sp_tasks ADD COLUMN branch_sum INTEGER;
-- Rises with every write that is acknowledged as durable, and is compared with the witness: see stores/witness.py.
ALTER TABLE sp_tasks ADD COLUMN writes INTEGER NOT NULL DEFAULT 0;

-- tasks: how many there are. last: the highest n that was ever given, so that none comes twice. store: what the file is called
-- by its witness (set with the step).
INSERT INTO sp_meta (key, value) VALUES ('tasks', 0), ('last', (SELECT coalesce(max(n), 0) FROM sp_tasks));

CREATE TRIGGER sp_tasks_more AFTER INSERT ON sp_tasks
BEGIN
    UPDATE sp_meta SET value = value + 1 WHERE key = 'tasks';
    UPDATE sp_meta SET value = max(value, NEW.n) WHERE key = 'last';
END;
CREATE TRIGGER sp_tasks_less AFTER DELETE ON sp_tasks BEGIN UPDATE sp_meta SET value = value - 1 WHERE key = 'tasks'; END;
-- Before, since a row that is written again replaces itself without firing a trigger of deletion.
CREATE TRIGGER sp_calls_more BEFORE INSERT ON sp_calls WHEN NOT EXISTS (SELECT 1 FROM sp_calls WHERE k = NEW.k)
BEGIN UPDATE sp_tasks SET calls = calls + 1 WHERE n = NEW.task; END;
CREATE TRIGGER sp_calls_less AFTER DELETE ON sp_calls BEGIN UPDATE sp_tasks SET calls = calls - 1 WHERE n = OLD.task; END;
CREATE TRIGGER sp_pauses_more BEFORE INSERT ON sp_pauses WHEN NOT EXISTS (SELECT 1 FROM sp_pauses WHERE k = NEW.k)
BEGIN UPDATE sp_tasks SET pauses = pauses + 1 WHERE n = NEW.task; END;
CREATE TRIGGER sp_pauses_less AFTER DELETE ON sp_pauses BEGIN UPDATE sp_tasks SET pauses = pauses - 1 WHERE n = OLD.task; END;

-- What repair took out of the way: kind and key say what it was, data is the row as it was found. Never deleted by the library.
CREATE TABLE sp_quarantine (
    k INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    task TEXT NOT NULL,
    key TEXT NOT NULL,
    why TEXT NOT NULL,
    at INTEGER NOT NULL,
    data BLOB NOT NULL
) STRICT;
