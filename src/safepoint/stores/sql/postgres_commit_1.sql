-- The functions behind the writing verbs of the PostgreSQL store, version 1. Each is one request. A library that needs another
-- adds it under another name: processes of two versions may run beside each other.
--
-- They lock the task's row first and compare in later statements: a statement that waits for a lock goes on with what it saw
-- before it waited. That holds at READ COMMITTED only, so anything else is refused. wait: milliseconds for a lock.

CREATE FUNCTION {s}.sp_enter_1(wait int, sync boolean) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    set text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the transaction is at %', upper(current_setting('transaction_isolation')) USING ERRCODE = 'SP001';
    END IF;
    set := set_config('lock_timeout', wait::text, true);
    IF NOT sync THEN
        set := set_config('synchronous_commit', 'off', true);
    ELSIF current_setting('synchronous_commit') = 'off' THEN
        set := set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN set;
END $$;

CREATE FUNCTION {s}.sp_now_1() RETURNS bigint LANGUAGE sql AS $$
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
$$;

-- A commit, in the order of Store.commit. All of it comes in three arrays by the class of its values, since each parameter costs
-- the server as much as looking up a row. First what is told here, then the rows: the checkpoint, the calls, the pauses, the writes,
-- each with its values in the order of the columns below; calls and pauses begin with the version that they must have now. After
-- them the branches that are set back or dropped, each with space and name, and seq and id of the head that it must have now and of the
-- one that it gets (none: it is dropped); and, in b, names, refs and data of the objects.
--
-- i: 1 flags (1 anyway, 2 at_head, 4 durable, 8 with a checkpoint, 16 it moves the head), 2 milliseconds for a lock, 3 fence of the
--     guard, 4 expect, 5 stands_on, 6 line of a new branch, 7 to 10 the last seq, call, pause and position that were foreseen, 11 to 14
--     those after it, 15 to 17 how many calls, pauses and objects there are, 18 to 20 a stage with the task and sweeps that it knew,
--     21 and 22 how many writes and branches.
-- s: 1 task, 2 id, 3 token of the guard, 4 token of a holder that is proven to have ended, 5 the transaction that this must be, 6 id
--     of expect, 7 id of stands_on, 8 to 12 status, agent, reason, parent and branch of the patch.
-- b: 1 raised and 2 input of the patch.
--
-- Returns a word (done, numbers, existed, repeated, lost, held, no_task, moved, not_at_head, gone, no_call, call, no_pause, pause,
-- moved_away, no_head, has_others, unstaged, ended), the task's last seq, call, pause, line and position, and what belongs to the word.
--
-- Plans must not depend on what a session happened to see first: all that is looked up here is found by its key.
CREATE FUNCTION {s}.sp_commit_1(i bigint[], s text[], b bytea[]) RETURNS text[]
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    with_row boolean := i[1] & 8 <> 0;
    -- Where the values of the calls, of the pauses, of the writes, of the branches and of the objects begin, less one.
    ci int := CASE WHEN with_row THEN 30 ELSE 22 END;
    cs int := CASE WHEN with_row THEN 17 ELSE 12 END;
    cb int := CASE WHEN with_row THEN 8 ELSE 2 END;
    pi int := ci + 16 * i[15];
    ps int := cs + 6 * i[15];
    pb int := cb + 10 * i[15];
    wi int := pi + 10 * i[16];
    ws int := ps + 3 * i[16];
    wb int := pb + 3 * i[16];
    mi int := wi + i[21];
    ms int := ws + 4 * i[21];
    ob int := wb + 3 * i[21];
    t record;
    l record;
    last text[];
    at_seq bigint;
    at_id text;
    v bigint;
    asked bigint;
    current text;
    lines bigint;
    line bigint;
    size bigint := 0;
    going text[] := '{{}}';
    drops boolean := false;
BEGIN
    IF s[5] IS NOT NULL AND pg_current_xact_id()::text <> s[5] THEN
        RETURN ARRAY['ended'];
    END IF;
    current := {s}.sp_enter_1(i[2]::int, i[1] & 4 <> 0);
    LOOP
        SELECT x.n, x.branch, x.last_seq, x.last_call, x.last_pause, x.last_line, x.last_position, x.sweeps, x.recent INTO t
        FROM {s}.sp_tasks x WHERE x.task = s[1] FOR UPDATE;
        IF t.n IS NULL THEN
            IF NOT (with_row OR i[21] > 0) OR i[3] IS NOT NULL THEN
                RETURN ARRAY['no_task', '0', '0', '0', '0', '0'];
            END IF;
            last := '{{0,0,0,0,0}}';
            at_seq := NULL;
            at_id := NULL;
        ELSE
            last := ARRAY[t.last_seq, t.last_call, t.last_pause, t.last_line, t.last_position]::text[];
            IF with_row THEN
                SELECT x.head_seq, x.head_id INTO at_seq, at_id
                FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = s[14] AND x.name = s[15];
                SELECT x.seq, x.parent_seq, x.branch, x.digest INTO l
                FROM {s}.sp_checkpoints x WHERE x.task = t.n AND x.space = s[14] AND x.id = s[2];
                IF l.seq IS NOT NULL THEN
                    RETURN 'existed'::text || last
                        || ARRAY[l.seq::text, l.parent_seq::text, l.branch, encode(l.digest, 'hex'), at_seq::text, at_id];
                END IF;
            END IF;
        END IF;

        IF i[3] IS NOT NULL THEN
            -- Held until this lands: who takes the task over waits for it.
            SELECT x.fence, x.token, x.state INTO l FROM {s}.sp_leases x WHERE x.task = t.n FOR KEY SHARE;
            IF (l.fence = i[3] AND l.token = s[3] AND l.state = 'held') IS NOT TRUE THEN
                IF l.state = 'held' THEN
                    RETURN 'lost'::text || last || ARRAY[l.fence::text, l.token];
                END IF;
                RETURN 'lost'::text || last || ARRAY[NULL, NULL];
            END IF;
        ELSIF i[1] & 1 = 0 THEN
            SELECT x.token, x.process, x.holder, x.acquired_at INTO l FROM {s}.sp_leases x
            WHERE x.task = t.n AND x.state = 'held' AND NOT x.gone AND x.until > clock_timestamp() AND x.token IS DISTINCT FROM s[4];
            IF l.token IS NOT NULL THEN
                RETURN 'held'::text || last || ARRAY[l.token, encode(l.process, 'hex'), encode(l.holder, 'hex'), l.acquired_at::text];
            END IF;
        END IF;
        IF NOT with_row THEN
            SELECT x INTO current FROM unnest(t.recent) x
            WHERE x = concat(split_part(x, '/', 1), '/', split_part(x, '/', 2), '/', s[2]) LIMIT 1;
            IF FOUND THEN
                RETURN 'repeated'::text || last || ARRAY[split_part(current, '/', 1), split_part(current, '/', 2)];
            END IF;
        ELSIF at_seq IS DISTINCT FROM i[4] OR at_id IS DISTINCT FROM s[6] THEN
            RETURN 'moved'::text || last || ARRAY[at_seq::text, at_id];
        END IF;
        IF i[1] & 2 <> 0 THEN
            SELECT x.head_seq, x.head_id INTO l FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = '' AND x.name = t.branch;
            IF l.head_seq IS DISTINCT FROM i[5] OR l.head_id IS DISTINCT FROM s[7] THEN
                RETURN 'not_at_head'::text || last || ARRAY[l.head_seq::text, l.head_id, coalesce(t.branch, 'main')];
            END IF;
        END IF;
        IF i[5] IS NOT NULL THEN
            PERFORM FROM {s}.sp_checkpoints x WHERE x.task = t.n AND x.seq = i[5] AND x.id = s[7];
            IF NOT FOUND THEN
                RETURN 'gone'::text || last;
            END IF;
        END IF;

        -- Numbers and versions come a second time after a failover; the key of a call and the time of a pause do not.
        FOR k IN 0 .. i[15] - 1 LOOP
            IF i[ci + 16 * k + 1] > 0 THEN
                SELECT x.version, x.idempotency_key INTO v, current FROM {s}.sp_calls x
                WHERE x.task = t.n AND x.no = i[ci + 16 * k + 2];
                IF v IS DISTINCT FROM i[ci + 16 * k + 1] OR current IS DISTINCT FROM s[cs + 6 * k + 4] THEN
                    RETURN CASE WHEN v IS NULL THEN 'no_call' ELSE 'call' END || last
                        || ARRAY[i[ci + 16 * k + 2]::text, v::text, i[ci + 16 * k + 1]::text];
                END IF;
            END IF;
        END LOOP;
        FOR k IN 0 .. i[16] - 1 LOOP
            IF i[pi + 10 * k + 1] > 0 THEN
                SELECT x.version, x.asked_at INTO v, asked FROM {s}.sp_pauses x
                WHERE x.task = t.n AND x.no = i[pi + 10 * k + 2];
                IF v IS DISTINCT FROM i[pi + 10 * k + 1] OR asked IS DISTINCT FROM i[pi + 10 * k + 8] THEN
                    RETURN CASE WHEN v IS NULL THEN 'no_pause' ELSE 'pause' END || last
                        || ARRAY[i[pi + 10 * k + 2]::text, v::text, i[pi + 10 * k + 1]::text];
                END IF;
            END IF;
        END LOOP;

        FOR k IN 0 .. i[22] - 1 LOOP
            SELECT x.head_seq, x.head_id INTO l FROM {s}.sp_branches x
            WHERE x.task = t.n AND x.space = s[ms + 4 * k + 1] AND x.name = s[ms + 4 * k + 2];
            IF l.head_seq IS DISTINCT FROM i[mi + 2 * k + 1] OR l.head_id IS DISTINCT FROM s[ms + 4 * k + 3] THEN
                RETURN 'moved_away'::text || last || ARRAY[l.head_seq::text, l.head_id, k::text];
            END IF;
            IF i[mi + 2 * k + 2] IS NOT NULL THEN
                PERFORM FROM {s}.sp_checkpoints x
                WHERE x.task = t.n AND x.seq = i[mi + 2 * k + 2] AND x.id = s[ms + 4 * k + 4] AND x.space = s[ms + 4 * k + 1];
                IF NOT FOUND THEN
                    RETURN 'no_head'::text || last || k::text;
                END IF;
            ELSIF s[ms + 4 * k + 1] = '' THEN
                going := going || s[ms + 4 * k + 2];
            END IF;
        END LOOP;
        IF coalesce(s[12], t.branch) = ANY (going)
            AND EXISTS (SELECT FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = '' AND x.name <> ALL (going))
        THEN
            RETURN 'has_others'::text || last || coalesce(s[12], t.branch);
        END IF;

        IF NOT with_row AND i[15] + i[16] = 0 THEN
            -- Nothing gets a number: what was foreseen does not matter.
            i[11] := last[1]::bigint;
            i[12] := last[2]::bigint;
            i[13] := last[3]::bigint;
            i[14] := last[5]::bigint;
        ELSIF last[1]::bigint <> i[7] OR last[2]::bigint <> i[8] OR last[3]::bigint <> i[9] OR last[5]::bigint <> i[10] THEN
            RETURN 'numbers'::text || last;
        END IF;
        IF i[18] IS NOT NULL THEN
            PERFORM FROM {s}.sp_stages x WHERE x.k = i[18] FOR UPDATE;
            -- -1: there was no task then, and with such a number none but this makes one. A task that was there and is gone has taken
            -- with it what was staged, or will.
            IF NOT FOUND OR (t.n IS NULL AND i[20] >= 0) OR t.n <> i[19] OR t.sweeps <> greatest(i[20], 0) THEN
                RETURN 'unstaged'::text || last;
            END IF;
        END IF;
        EXIT WHEN t.n IS NOT NULL;

        IF i[19] IS NULL THEN
            INSERT INTO {s}.sp_tasks (task, status, branch, created_at, updated_at)
            VALUES (s[1], 'idle', 'main', {s}.sp_now_1(), 0) ON CONFLICT (task) DO NOTHING;
        ELSE
            INSERT INTO {s}.sp_tasks (n, task, status, branch, created_at, updated_at) OVERRIDING SYSTEM VALUE
            VALUES (i[19], s[1], 'idle', 'main', {s}.sp_now_1(), 0) ON CONFLICT (task) DO NOTHING;
        END IF;
        -- Again from the start: it is there now, ours or that of somebody who was faster.
    END LOOP;

    FOR k IN ob + 1 .. ob + i[17] LOOP
        INSERT INTO {s}.sp_objects AS o (task, name, refs, data) VALUES (t.n, b[k], b[k + i[17]], b[k + 2 * i[17]])
        ON CONFLICT (task, name) DO UPDATE SET refs = excluded.refs, data = excluded.data
        WHERE o.data <> excluded.data OR o.refs <> excluded.refs;
        IF FOUND THEN
            size := size + 16 + octet_length(b[k + i[17]]) + octet_length(b[k + 2 * i[17]]);
        END IF;
    END LOOP;
    FOR k IN 0 .. i[15] - 1 LOOP
        INSERT INTO {s}.sp_calls (task, no, line, step, scope, attempts, fence, base_seq, started_at, finished_at, asked, began, ended,
            not_done, superseded, version, tool, effect, call_id, idempotency_key, status, reason, ident, op_key, seal, policy, args_refs,
            result_refs, error, model, args, result)
        VALUES (t.n, i[ci + 16 * k + 2], i[ci + 16 * k + 3], i[ci + 16 * k + 4], i[ci + 16 * k + 5], i[ci + 16 * k + 6],
            i[ci + 16 * k + 7], i[ci + 16 * k + 8], i[ci + 16 * k + 9], i[ci + 16 * k + 10], i[ci + 16 * k + 11], i[ci + 16 * k + 12],
            i[ci + 16 * k + 13], i[ci + 16 * k + 14] <> 0, i[ci + 16 * k + 15] <> 0, i[ci + 16 * k + 16],
            s[cs + 6 * k + 1], s[cs + 6 * k + 2], s[cs + 6 * k + 3], s[cs + 6 * k + 4], s[cs + 6 * k + 5], s[cs + 6 * k + 6],
            b[cb + 10 * k + 1], b[cb + 10 * k + 2], b[cb + 10 * k + 3], b[cb + 10 * k + 4], b[cb + 10 * k + 5], b[cb + 10 * k + 6],
            b[cb + 10 * k + 7], b[cb + 10 * k + 8], b[cb + 10 * k + 9], b[cb + 10 * k + 10])
        ON CONFLICT (task, no) DO UPDATE SET line = excluded.line, step = excluded.step, scope = excluded.scope,
            attempts = excluded.attempts, fence = excluded.fence, base_seq = excluded.base_seq, started_at = excluded.started_at,
            finished_at = excluded.finished_at, asked = excluded.asked, began = excluded.began, ended = excluded.ended,
            not_done = excluded.not_done, superseded = excluded.superseded, version = excluded.version, tool = excluded.tool,
            effect = excluded.effect, call_id = excluded.call_id, idempotency_key = excluded.idempotency_key,
            status = excluded.status, reason = excluded.reason, ident = excluded.ident, op_key = excluded.op_key,
            seal = excluded.seal, policy = excluded.policy, args_refs = excluded.args_refs, result_refs = excluded.result_refs,
            error = excluded.error, model = excluded.model, args = excluded.args, result = excluded.result;
    END LOOP;
    FOR k IN 0 .. i[16] - 1 LOOP
        INSERT INTO {s}.sp_pauses (task, no, line, step, occurrence, call_no, base_seq, asked_at, answered_at, version, space, name,
            status, seal, question, answer)
        VALUES (t.n, i[pi + 10 * k + 2], i[pi + 10 * k + 3], i[pi + 10 * k + 4], i[pi + 10 * k + 5], i[pi + 10 * k + 6],
            i[pi + 10 * k + 7], i[pi + 10 * k + 8], i[pi + 10 * k + 9], i[pi + 10 * k + 10],
            s[ps + 3 * k + 1], s[ps + 3 * k + 2], s[ps + 3 * k + 3], b[pb + 3 * k + 1], b[pb + 3 * k + 2], b[pb + 3 * k + 3])
        ON CONFLICT (task, no) DO UPDATE SET line = excluded.line, step = excluded.step, occurrence = excluded.occurrence,
            call_no = excluded.call_no, base_seq = excluded.base_seq, asked_at = excluded.asked_at,
            answered_at = excluded.answered_at, version = excluded.version, space = excluded.space, name = excluded.name,
            status = excluded.status, seal = excluded.seal, question = excluded.question, answer = excluded.answer;
    END LOOP;
    FOR k IN 0 .. i[21] - 1 LOOP
        INSERT INTO {s}.sp_writes (task, idx, space, checkpoint, writer, path, seal, refs, data)
        VALUES (t.n, i[wi + k + 1], s[ws + 4 * k + 1], s[ws + 4 * k + 2], s[ws + 4 * k + 3], s[ws + 4 * k + 4],
            b[wb + 3 * k + 1], b[wb + 3 * k + 2], b[wb + 3 * k + 3])
        ON CONFLICT (task, space, checkpoint, writer, idx) DO UPDATE SET k = DEFAULT, path = excluded.path, seal = excluded.seal,
            refs = excluded.refs, data = excluded.data
        WHERE excluded.idx < 0;
        IF NOT FOUND THEN
            size := size - length(s[ws + 4 * k + 1]) - length(s[ws + 4 * k + 2]) - length(s[ws + 4 * k + 3])
                - length(s[ws + 4 * k + 4]) - octet_length(b[wb + 3 * k + 1]) - octet_length(b[wb + 3 * k + 2])
                - octet_length(b[wb + 3 * k + 3]);
        END IF;
    END LOOP;
    FOR k IN 0 .. i[22] - 1 LOOP
        IF i[mi + 2 * k + 2] IS NULL THEN
            drops := true;
            DELETE FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = s[ms + 4 * k + 1] AND x.name = s[ms + 4 * k + 2];
        ELSE
            UPDATE {s}.sp_branches x SET head_seq = i[mi + 2 * k + 2], head_id = s[ms + 4 * k + 4]
            WHERE x.task = t.n AND x.space = s[ms + 4 * k + 1] AND x.name = s[ms + 4 * k + 2];
        END IF;
    END LOOP;
    current := t.branch;
    lines := t.last_line;
    IF with_row THEN
        INSERT INTO {s}.sp_checkpoints (task, seq, parent_seq, step, created_at, format, schema, size, pinned, id, space, branch, kind,
            label, digest, seal, metadata, metrics, refs, root)
        VALUES (t.n, i[23], i[24], i[25], i[26], i[27], i[28], i[29], i[30] <> 0, s[13], s[14], s[15], s[16], s[17],
            b[3], b[4], b[5], b[6], b[7], b[8]);
        IF i[1] & 16 = 0 THEN
            NULL; -- A failure leaf: no branch stands there.
        ELSIF at_seq IS NOT NULL THEN
            UPDATE {s}.sp_branches x SET head_seq = i[23], head_id = s[2] WHERE x.task = t.n AND x.space = s[14] AND x.name = s[15];
        ELSE
            line := coalesce(i[6], lines + 1);
            lines := greatest(lines, line);
            -- A task's first branch is its current one.
            IF s[14] = '' AND NOT EXISTS (SELECT FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = '') THEN
                current := s[15];
            END IF;
            INSERT INTO {s}.sp_branches (task, space, name, head_seq, head_id, line, forked_from)
            VALUES (t.n, s[14], s[15], i[23], s[2], line, i[24]);
        END IF;
    ELSE
        t.recent := t.recent[cardinality(t.recent) - 14:] || concat(last[2], '/', last[3], '/', s[2]);
    END IF;
    UPDATE {s}.sp_tasks SET last_seq = i[11], last_call = i[12], last_pause = i[13], last_position = i[14], last_line = lines,
        checkpoints = checkpoints + (i[1] >> 3 & 1), updated_at = {s}.sp_now_1(), recent = t.recent, status = coalesce(s[8], status),
        agent = coalesce(s[9], agent), reason = coalesce(s[10], reason), parent = coalesce(s[11], parent),
        branch = coalesce(s[12], current), raised = coalesce(b[1], raised), dropped = sp_tasks.dropped OR drops
    WHERE n = t.n;
    IF b[2] IS NOT NULL THEN
        INSERT INTO {s}.sp_inputs (task, input) VALUES (t.n, b[2]) ON CONFLICT (task) DO UPDATE SET input = excluded.input;
    END IF;
    IF i[18] IS NOT NULL THEN
        DELETE FROM {s}.sp_stages x WHERE x.k = i[18];
    END IF;
    RETURN ARRAY['done', i[11]::text, i[12]::text, i[13]::text, lines::text, i[14]::text, size::text];
END $$;

-- The beginning of a transactional tool's transaction: its call must stand at this version. Answers as sp_commit_1 does; with `done`
-- comes the transaction's own number. The tool waits for locks as long as it likes: with a SET of its own, what this function sets
-- ends with it.
CREATE FUNCTION {s}.sp_transact_1(
    p_task text, p_fence bigint, p_token text, p_no bigint, p_version bigint, p_key text, wait int, sync boolean
) RETURNS text[]
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET lock_timeout = 0 AS $$
DECLARE
    done text := {s}.sp_enter_1(wait, sync);
    t record;
    l record;
    last text[];
    v bigint;
    key text;
BEGIN
    SELECT x.n, x.last_seq, x.last_call, x.last_pause, x.last_line, x.last_position INTO t
    FROM {s}.sp_tasks x WHERE x.task = p_task FOR UPDATE;
    IF t.n IS NULL THEN
        RETURN ARRAY['no_task', '0', '0', '0', '0', '0'];
    END IF;
    last := ARRAY[t.last_seq, t.last_call, t.last_pause, t.last_line, t.last_position]::text[];
    SELECT x.fence, x.token, x.state INTO l FROM {s}.sp_leases x WHERE x.task = t.n FOR KEY SHARE;
    IF (l.fence = p_fence AND l.token = p_token AND l.state = 'held') IS NOT TRUE THEN
        IF l.state = 'held' THEN
            RETURN 'lost'::text || last || ARRAY[l.fence::text, l.token];
        END IF;
        RETURN 'lost'::text || last || ARRAY[NULL, NULL];
    END IF;
    SELECT x.version, x.idempotency_key INTO v, key FROM {s}.sp_calls x WHERE x.task = t.n AND x.no = p_no;
    IF v IS DISTINCT FROM p_version OR key IS DISTINCT FROM p_key THEN
        RETURN CASE WHEN v IS NULL THEN 'no_call' ELSE 'call' END || last || ARRAY[p_no::text, v::text, p_version::text];
    END IF;
    RETURN 'done'::text || last || pg_current_xact_id()::text;
END $$;

-- Whether a commit has landed, asked under the task's lock: what was under way when its connection was lost has ended by then.
CREATE FUNCTION {s}.sp_landed_1(p_task text, p_id text, p_space text, wait int) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    t record;
    done text := {s}.sp_enter_1(wait, true);
BEGIN
    SELECT x.n INTO t FROM {s}.sp_tasks x WHERE x.task = p_task FOR UPDATE;
    RETURN EXISTS (SELECT FROM {s}.sp_tasks y, unnest(y.recent) x WHERE y.n = t.n
            AND x = concat(split_part(x, '/', 1), '/', split_part(x, '/', 2), '/', p_id))
        OR EXISTS (SELECT FROM {s}.sp_checkpoints x WHERE x.task = t.n AND x.space = p_space AND x.id = p_id);
END $$;

-- A part of a big save, sent ahead; the first has no k. Others see that the save goes on for `seconds` more.
CREATE FUNCTION {s}.sp_stage_1(
    p_task text, p_fence bigint, p_token text, wait int, p_k bigint, p_n bigint, seconds float8, o_name bytea[], o_refs bytea[], o_data bytea[],
    OUT answer text, OUT numbers bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    done text := {s}.sp_enter_1(wait, false);
    t record;
    l record;
BEGIN
    SELECT x.n, x.sweeps INTO t FROM {s}.sp_tasks x WHERE x.task = p_task;
    IF p_k IS NULL THEN
        IF p_fence IS NOT NULL THEN
            SELECT x.fence, x.token, x.state INTO l FROM {s}.sp_leases x WHERE x.task = t.n;
            IF (l.fence = p_fence AND l.token = p_token AND l.state = 'held') IS NOT TRUE THEN
                answer := CASE WHEN t.n IS NULL THEN 'no_task' ELSE 'lost' END;
                numbers := ARRAY[CASE l.state WHEN 'held' THEN l.fence END];
                RETURN;
            END IF;
        END IF;
        p_n := coalesce(t.n, nextval('{s}.sp_tasks_n_seq'));
        INSERT INTO {s}.sp_stages (n, until) VALUES (p_n, clock_timestamp() + seconds * interval '1 second') RETURNING k INTO p_k;
    ELSE
        UPDATE {s}.sp_stages SET until = clock_timestamp() + seconds * interval '1 second' WHERE k = p_k;
        IF NOT FOUND THEN
            answer := 'unstaged';
            RETURN;
        END IF;
    END IF;
    INSERT INTO {s}.sp_objects AS o (task, stage, name, refs, data)
    SELECT p_n, p_k, x.name, x.refs, x.data FROM unnest(o_name, o_refs, o_data) x (name, refs, data)
    ON CONFLICT (task, name) DO UPDATE SET refs = excluded.refs, data = excluded.data
    WHERE o.data <> excluded.data OR o.refs <> excluded.refs;
    answer := 'done';
    numbers := ARRAY[p_k, p_n, coalesce(t.sweeps, -1)];
END $$;

-- Take the lease. token: drawn before the first try; a request that is repeated finds its own. dead: token of a holder that is
-- proven to have ended. looked: token of one that could be neither proven nor excluded to have; an old lease is taken from nobody else.
-- answer: done (numbers: fence, presumed; names: previous), over (it was granted before, and others since), held (numbers: acquired_at, whether live; names: token; blobs: process, holder).
CREATE FUNCTION {s}.sp_acquire_1(
    p_task text, p_token text, p_process bytea, p_holder bytea, seconds float8, steal boolean, dead text, looked text, wait int, sync boolean,
    OUT answer text, OUT numbers bigint[], OUT names text[], OUT blobs bytea[]
) LANGUAGE plpgsql AS $$
DECLARE
    done text := {s}.sp_enter_1(wait, sync);
    t record;
    l record;
    before text := '';
    old bigint;
    guess bigint := 0;
BEGIN
    LOOP
        SELECT x.n INTO t FROM {s}.sp_tasks x WHERE x.task = p_task FOR UPDATE;
        EXIT WHEN t.n IS NOT NULL;
        INSERT INTO {s}.sp_tasks (task, status, branch, created_at, updated_at)
        VALUES (p_task, 'idle', 'main', {s}.sp_now_1(), 0) ON CONFLICT (task) DO NOTHING;
    END LOOP;
    -- Waits for commits that stand on it; a plain UPDATE would not.
    SELECT * INTO l FROM {s}.sp_leases x WHERE x.task = t.n FOR UPDATE;
    IF l.fence IS NULL THEN
        -- A receiver may have seen the fences of a deleted task of this name.
        SELECT x.value::bigint INTO old FROM {s}.sp_meta x WHERE x.key = 'fence';
        old := coalesce(old, 0);
    ELSIF l.token = p_token THEN
        answer := 'done';
        numbers := ARRAY[l.fence, l.presumed];
        names := ARRAY[l.previous];
        RETURN;
    ELSIF p_token = ANY (l.recent) THEN
        answer := 'over';
        RETURN;
    ELSE
        old := l.fence;
        guess := l.presumed;
        IF l.state = 'released' THEN
            before := 'released';
        ELSIF l.gone OR l.token = dead THEN
            before := 'dead';
        ELSIF l.token = looked AND (steal OR l.until <= clock_timestamp()) THEN
            before := 'presumed_dead';
            guess := l.fence;
        ELSE
            answer := 'held';
            numbers := ARRAY[l.acquired_at, (l.until > clock_timestamp())::int];
            names := ARRAY[l.token];
            blobs := ARRAY[l.process, l.holder];
            RETURN;
        END IF;
    END IF;
    INSERT INTO {s}.sp_leases AS x (task, fence, token, state, gone, until, process, holder, acquired_at, presumed, previous, recent)
    VALUES (t.n, old + 1, p_token, 'held', false, clock_timestamp() + seconds * interval '1 second', p_process, p_holder,
        {s}.sp_now_1(), guess, before, l.recent[cardinality(l.recent) - 14:] || p_token)
    ON CONFLICT (task) DO UPDATE SET fence = excluded.fence, token = excluded.token, state = excluded.state, gone = excluded.gone,
        until = excluded.until, process = excluded.process, holder = excluded.holder, acquired_at = excluded.acquired_at,
        presumed = excluded.presumed, previous = excluded.previous, recent = excluded.recent;
    UPDATE {s}.sp_tasks SET status = 'running', attempts = attempts + 1, updated_at = {s}.sp_now_1() WHERE n = t.n;
    answer := 'done';
    numbers := ARRAY[old + 1, guess];
    names := ARRAY[before];
END $$;

CREATE FUNCTION {s}.sp_release_1(
    p_task text, p_fence bigint, p_token text, wait int, sync boolean, names text[], p_raised bytea, p_input bytea
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    done text := {s}.sp_enter_1(wait, sync);
    t record;
BEGIN
    SELECT x.n INTO t FROM {s}.sp_tasks x WHERE x.task = p_task FOR UPDATE;
    PERFORM FROM {s}.sp_leases x
    WHERE x.task = t.n AND x.fence = p_fence AND x.token = p_token AND x.state = 'held' FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE {s}.sp_leases SET state = 'released' WHERE task = t.n;
    UPDATE {s}.sp_tasks SET status = coalesce(names[1], status), agent = coalesce(names[2], agent),
        reason = coalesce(names[3], reason), parent = coalesce(names[4], parent), branch = coalesce(names[5], branch),
        raised = coalesce(p_raised, raised), updated_at = {s}.sp_now_1()
    WHERE n = t.n;
    IF p_input IS NOT NULL THEN
        INSERT INTO {s}.sp_inputs AS x (task, input) VALUES (t.n, p_input)
        ON CONFLICT (task) DO UPDATE SET input = excluded.input;
    END IF;
    RETURN true;
END $$;
