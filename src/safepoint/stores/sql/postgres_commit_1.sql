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

-- A commit, in the order of Store.commit. Rows come in three arrays by the class of their values: the checkpoint first, then the
-- calls, then the pauses, each with its values in the order of the columns below; calls and pauses begin with the version that
-- they must have now.
--
-- flags: 1 anyway, 2 at_head, 4 durable, 8 with a checkpoint, 16 it moves the head.
-- num: 1 expect, 2 stands_on, 3 line of a new branch, 4..7 the last seq, call, pause and position that were foreseen, 8 and 9 calls
--     and pauses in it, 10 to 12 a stage with the task and sweeps that it knew, 13 to 16 the last seq, call, pause and position after it.
-- str: 1 id of expect, 2 id of stands_on, 3 to 7 the patch.
-- dead: token of a holder that is proven to have ended. xact: the transaction that this must be.
--
-- answer: done, numbers, existed, repeated, lost, held, no_task, moved, not_at_head, gone, no_call, call, no_pause, pause, unstaged,
--     ended. numbers: the task's last seq, call, pause, line, position; then what belongs to the answer.
CREATE FUNCTION {s}.sp_commit_1(
    p_task text, p_id text, p_fence bigint, p_token text, flags int, wait int, dead text, xact text, num bigint[], str text[],
    i bigint[], s text[], b bytea[], o_name bytea[], o_refs bytea[], o_data bytea[], p_raised bytea, p_input bytea,
    OUT answer text, OUT numbers bigint[], OUT names text[], OUT blobs bytea[]
) LANGUAGE plpgsql AS $$
DECLARE
    t record;
    l record;
    at_seq bigint;
    at_id text;
    v bigint;
    ci bigint := 0;
    cs bigint := 0;
    cb bigint := 0;
    pi bigint;
    ps bigint;
    pb bigint;
    with_row boolean := flags & 8 <> 0;
    current text;
    lines bigint;
    line bigint;
    size bigint := 0;
BEGIN
    IF xact IS NOT NULL AND pg_current_xact_id()::text <> xact THEN
        answer := 'ended';
        RETURN;
    END IF;
    current := {s}.sp_enter_1(wait, flags & 4 <> 0);
    IF with_row THEN
        ci := 8;
        cs := 5;
        cb := 6;
    END IF;
    pi := ci + 16 * num[8];
    ps := cs + 6 * num[8];
    pb := cb + 10 * num[8];
    LOOP
        SELECT x.n, x.branch, x.last_seq, x.last_call, x.last_pause, x.last_line, x.last_position, x.sweeps, x.recent INTO t
        FROM {s}.sp_tasks x WHERE x.task = p_task FOR UPDATE;
        numbers := ARRAY[coalesce(t.last_seq, 0), coalesce(t.last_call, 0), coalesce(t.last_pause, 0), coalesce(t.last_line, 0),
            coalesce(t.last_position, 0)];
        IF t.n IS NULL THEN
            IF NOT with_row OR p_fence IS NOT NULL THEN
                answer := 'no_task';
                RETURN;
            END IF;
            IF num[1] IS NOT NULL THEN
                answer := 'moved';
                RETURN;
            END IF;
        END IF;
        IF with_row AND t.n IS NOT NULL THEN
            SELECT x.head_seq, x.head_id INTO at_seq, at_id FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = s[2] AND x.name = s[3];
            SELECT x.seq, x.parent_seq, x.branch, x.digest INTO l
            FROM {s}.sp_checkpoints x WHERE x.task = t.n AND x.space = s[2] AND x.id = p_id;
            IF l.seq IS NOT NULL THEN
                answer := 'existed';
                numbers := numbers || ARRAY[l.seq, l.parent_seq, at_seq];
                names := ARRAY[l.branch, at_id];
                blobs := ARRAY[l.digest];
                RETURN;
            END IF;
        END IF;

        IF p_fence IS NOT NULL THEN
            -- Held until this lands: who takes the task over waits for it.
            SELECT x.fence, x.token, x.state INTO l FROM {s}.sp_leases x WHERE x.task = t.n FOR KEY SHARE;
            IF (l.fence = p_fence AND l.token = p_token AND l.state = 'held') IS NOT TRUE THEN
                answer := 'lost';
                numbers := numbers || CASE l.state WHEN 'held' THEN l.fence END;
                names := ARRAY[CASE l.state WHEN 'held' THEN l.token END];
                RETURN;
            END IF;
        ELSIF flags & 1 = 0 THEN
            SELECT x.token, x.process, x.holder, x.acquired_at INTO l FROM {s}.sp_leases x
            WHERE x.task = t.n AND x.state = 'held' AND NOT x.gone AND x.until > clock_timestamp()
                AND x.token IS DISTINCT FROM dead;
            IF l.token IS NOT NULL THEN
                answer := 'held';
                numbers := numbers || l.acquired_at;
                names := ARRAY[l.token];
                blobs := ARRAY[l.process, l.holder];
                RETURN;
            END IF;
        END IF;
        IF NOT with_row THEN
            SELECT x INTO current FROM unnest(t.recent) x
            WHERE x = concat(split_part(x, '/', 1), '/', split_part(x, '/', 2), '/', p_id) LIMIT 1;
            IF FOUND THEN
                answer := 'repeated';
                numbers := numbers || ARRAY[split_part(current, '/', 1)::bigint, split_part(current, '/', 2)::bigint];
                RETURN;
            END IF;
        ELSIF at_seq IS DISTINCT FROM num[1] OR at_id IS DISTINCT FROM str[1] THEN
            answer := 'moved';
            numbers := numbers || at_seq;
            names := ARRAY[at_id];
            RETURN;
        END IF;
        IF flags & 2 <> 0 THEN
            SELECT x.head_seq, x.head_id INTO l FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = '' AND x.name = t.branch;
            IF l.head_seq IS DISTINCT FROM num[2] OR l.head_id IS DISTINCT FROM str[2] THEN
                answer := 'not_at_head';
                numbers := numbers || l.head_seq;
                names := ARRAY[l.head_id, coalesce(t.branch, 'main')];
                RETURN;
            END IF;
        END IF;
        IF num[2] IS NOT NULL THEN
            PERFORM FROM {s}.sp_checkpoints x WHERE x.task = t.n AND x.seq = num[2] AND x.id = str[2];
            IF NOT FOUND THEN
                answer := 'gone';
                RETURN;
            END IF;
        END IF;

        FOR k IN 0 .. num[8] - 1 LOOP
            IF i[ci + 16 * k + 1] > 0 THEN
                SELECT x.version INTO v FROM {s}.sp_calls x WHERE x.task = t.n AND x.no = i[ci + 16 * k + 2];
                IF v IS DISTINCT FROM i[ci + 16 * k + 1] THEN
                    answer := CASE WHEN v IS NULL THEN 'no_call' ELSE 'call' END;
                    numbers := numbers || ARRAY[i[ci + 16 * k + 2], v, i[ci + 16 * k + 1]];
                    RETURN;
                END IF;
            END IF;
        END LOOP;
        FOR k IN 0 .. num[9] - 1 LOOP
            IF i[pi + 10 * k + 1] > 0 THEN
                SELECT x.version INTO v FROM {s}.sp_pauses x WHERE x.task = t.n AND x.no = i[pi + 10 * k + 2];
                IF v IS DISTINCT FROM i[pi + 10 * k + 1] THEN
                    answer := CASE WHEN v IS NULL THEN 'no_pause' ELSE 'pause' END;
                    numbers := numbers || ARRAY[i[pi + 10 * k + 2], v, i[pi + 10 * k + 1]];
                    RETURN;
                END IF;
            END IF;
        END LOOP;

        IF numbers[1] <> num[4] OR numbers[2] <> num[5] OR numbers[3] <> num[6] OR numbers[5] <> num[7] THEN
            answer := 'numbers';
            RETURN;
        END IF;
        IF num[10] IS NOT NULL THEN
            PERFORM FROM {s}.sp_stages x WHERE x.k = num[10] FOR UPDATE;
            IF NOT FOUND OR coalesce(t.n, num[11]) <> num[11] OR coalesce(t.sweeps, 0) <> num[12] THEN
                answer := 'unstaged';
                RETURN;
            END IF;
        END IF;
        EXIT WHEN t.n IS NOT NULL;

        IF num[11] IS NULL THEN
            INSERT INTO {s}.sp_tasks (task, status, branch, created_at, updated_at)
            VALUES (p_task, 'idle', 'main', {s}.sp_now_1(), 0) ON CONFLICT (task) DO NOTHING;
        ELSE
            INSERT INTO {s}.sp_tasks (n, task, status, branch, created_at, updated_at) OVERRIDING SYSTEM VALUE
            VALUES (num[11], p_task, 'idle', 'main', {s}.sp_now_1(), 0) ON CONFLICT (task) DO NOTHING;
        END IF;
        -- Again from the start: it is there now, ours or that of somebody who was faster.
    END LOOP;

    IF o_name IS NOT NULL THEN
        WITH put AS (
            INSERT INTO {s}.sp_objects AS o (task, name, refs, data)
            SELECT t.n, x.name, x.refs, x.data FROM unnest(o_name, o_refs, o_data) x (name, refs, data)
            ON CONFLICT (task, name) DO UPDATE SET refs = excluded.refs, data = excluded.data
            WHERE o.data <> excluded.data OR o.refs <> excluded.refs
            RETURNING 16 + octet_length(o.refs) + octet_length(o.data) AS size
        )
        SELECT coalesce(sum(put.size), 0) INTO size FROM put;
    END IF;
    IF num[8] > 0 THEN
        INSERT INTO {s}.sp_calls AS c (task, no, line, step, scope, attempts, fence, base_seq, started_at, finished_at, asked, began,
            ended, not_done, superseded, version, tool, effect, call_id, idempotency_key, status, reason, ident, op_key, seal, policy,
            args_refs, result_refs, error, model, args, result)
        SELECT t.n, i[ci + 16 * x + 2], i[ci + 16 * x + 3], i[ci + 16 * x + 4], i[ci + 16 * x + 5], i[ci + 16 * x + 6],
            i[ci + 16 * x + 7], i[ci + 16 * x + 8], i[ci + 16 * x + 9], i[ci + 16 * x + 10], i[ci + 16 * x + 11],
            i[ci + 16 * x + 12], i[ci + 16 * x + 13], i[ci + 16 * x + 14] <> 0, i[ci + 16 * x + 15] <> 0, i[ci + 16 * x + 16],
            s[cs + 6 * x + 1], s[cs + 6 * x + 2], s[cs + 6 * x + 3], s[cs + 6 * x + 4], s[cs + 6 * x + 5], s[cs + 6 * x + 6],
            b[cb + 10 * x + 1], b[cb + 10 * x + 2], b[cb + 10 * x + 3], b[cb + 10 * x + 4], b[cb + 10 * x + 5],
            b[cb + 10 * x + 6], b[cb + 10 * x + 7], b[cb + 10 * x + 8], b[cb + 10 * x + 9], b[cb + 10 * x + 10]
        FROM generate_series(0, num[8] - 1) x
        ON CONFLICT (task, no) DO UPDATE SET line = excluded.line, step = excluded.step, scope = excluded.scope,
            attempts = excluded.attempts, fence = excluded.fence, base_seq = excluded.base_seq, started_at = excluded.started_at,
            finished_at = excluded.finished_at, asked = excluded.asked, began = excluded.began, ended = excluded.ended,
            not_done = excluded.not_done, superseded = excluded.superseded, version = excluded.version, tool = excluded.tool,
            effect = excluded.effect, call_id = excluded.call_id, idempotency_key = excluded.idempotency_key,
            status = excluded.status, reason = excluded.reason, ident = excluded.ident, op_key = excluded.op_key,
            seal = excluded.seal, policy = excluded.policy, args_refs = excluded.args_refs, result_refs = excluded.result_refs,
            error = excluded.error, model = excluded.model, args = excluded.args, result = excluded.result;
    END IF;
    IF num[9] > 0 THEN
        INSERT INTO {s}.sp_pauses (task, no, line, step, occurrence, call_no, base_seq, asked_at, answered_at, version, space, name,
            status, seal, question, answer)
        SELECT t.n, i[pi + 10 * x + 2], i[pi + 10 * x + 3], i[pi + 10 * x + 4], i[pi + 10 * x + 5], i[pi + 10 * x + 6],
            i[pi + 10 * x + 7], i[pi + 10 * x + 8], i[pi + 10 * x + 9], i[pi + 10 * x + 10],
            s[ps + 3 * x + 1], s[ps + 3 * x + 2], s[ps + 3 * x + 3], b[pb + 3 * x + 1], b[pb + 3 * x + 2], b[pb + 3 * x + 3]
        FROM generate_series(0, num[9] - 1) x
        ON CONFLICT (task, no) DO UPDATE SET line = excluded.line, step = excluded.step, occurrence = excluded.occurrence,
            call_no = excluded.call_no, base_seq = excluded.base_seq, asked_at = excluded.asked_at,
            answered_at = excluded.answered_at, version = excluded.version, space = excluded.space, name = excluded.name,
            status = excluded.status, seal = excluded.seal, question = excluded.question, answer = excluded.answer;
    END IF;
    current := t.branch;
    lines := t.last_line;
    IF with_row THEN
        INSERT INTO {s}.sp_checkpoints (task, seq, parent_seq, step, created_at, format, schema, size, pinned, id, space, branch, kind,
            label, digest, seal, metadata, metrics, refs, root)
        VALUES (t.n, i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8] <> 0, s[1], s[2], s[3], s[4], s[5],
            b[1], b[2], b[3], b[4], b[5], b[6]);
        IF flags & 16 = 0 THEN
            NULL;
        ELSIF num[1] IS NOT NULL THEN
            UPDATE {s}.sp_branches x SET head_seq = i[1], head_id = p_id WHERE x.task = t.n AND x.space = s[2] AND x.name = s[3];
        ELSE
            line := coalesce(num[3], lines + 1);
            lines := greatest(lines, line);
            -- A task's first branch is its current one.
            IF s[2] = '' AND NOT EXISTS (SELECT FROM {s}.sp_branches x WHERE x.task = t.n AND x.space = '') THEN
                current := s[3];
            END IF;
            INSERT INTO {s}.sp_branches (task, space, name, head_seq, head_id, line, forked_from)
            VALUES (t.n, s[2], s[3], i[1], p_id, line, i[2]);
        END IF;
    ELSE
        t.recent := t.recent[greatest(1, cardinality(t.recent) - 14):] || concat(t.last_call, '/', t.last_pause, '/', p_id);
    END IF;
    UPDATE {s}.sp_tasks SET last_seq = num[13], last_call = num[14], last_pause = num[15], last_position = num[16],
        last_line = lines, checkpoints = checkpoints + (flags >> 3 & 1), updated_at = {s}.sp_now_1(),
        recent = t.recent, status = coalesce(str[3], status), agent = coalesce(str[4], agent), reason = coalesce(str[5], reason),
        parent = coalesce(str[6], parent), branch = coalesce(str[7], current), raised = coalesce(p_raised, raised)
    WHERE n = t.n;
    IF p_input IS NOT NULL THEN
        INSERT INTO {s}.sp_inputs AS x (task, input) VALUES (t.n, p_input)
        ON CONFLICT (task) DO UPDATE SET input = excluded.input;
    END IF;
    IF num[10] IS NOT NULL THEN
        DELETE FROM {s}.sp_stages x WHERE x.k = num[10];
    END IF;
    answer := 'done';
    numbers := ARRAY[num[13], num[14], num[15], lines, num[16], size];
END $$;

-- The beginning of a transactional tool's transaction: its call must stand at this version. names: the transaction's own number.
CREATE FUNCTION {s}.sp_transact_1(
    p_task text, p_fence bigint, p_token text, p_no bigint, p_version bigint,
    OUT answer text, OUT numbers bigint[], OUT names text[]
) LANGUAGE plpgsql AS $$
DECLARE
    t record;
    l record;
    v bigint;
BEGIN
    SELECT x.n, x.last_seq, x.last_call, x.last_pause, x.last_line, x.last_position INTO t
    FROM {s}.sp_tasks x WHERE x.task = p_task FOR UPDATE;
    numbers := ARRAY[coalesce(t.last_seq, 0), coalesce(t.last_call, 0), coalesce(t.last_pause, 0), coalesce(t.last_line, 0),
        coalesce(t.last_position, 0)];
    IF t.n IS NULL THEN
        answer := 'no_task';
        RETURN;
    END IF;
    SELECT x.fence, x.token, x.state INTO l FROM {s}.sp_leases x WHERE x.task = t.n FOR KEY SHARE;
    IF (l.fence = p_fence AND l.token = p_token AND l.state = 'held') IS NOT TRUE THEN
        answer := 'lost';
        numbers := numbers || CASE l.state WHEN 'held' THEN l.fence END;
        names := ARRAY[CASE l.state WHEN 'held' THEN l.token END];
        RETURN;
    END IF;
    SELECT x.version INTO v FROM {s}.sp_calls x WHERE x.task = t.n AND x.no = p_no;
    IF v IS DISTINCT FROM p_version THEN
        answer := CASE WHEN v IS NULL THEN 'no_call' ELSE 'call' END;
        numbers := numbers || ARRAY[p_no, v, p_version];
        RETURN;
    END IF;
    answer := 'done';
    names := ARRAY[pg_current_xact_id()::text];
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
    numbers := ARRAY[p_k, p_n, coalesce(t.sweeps, 0)];
END $$;

-- Take the lease. token: drawn before the first try; a request that is repeated finds its own. dead: token of a holder that is
-- proven to have ended. looked: token of one that could be neither proven nor excluded to have; an old lease is taken from nobody else.
-- answer: done (numbers: fence, presumed; names: previous), held (numbers: acquired_at, whether live; names: token; blobs: process, holder).
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
    INSERT INTO {s}.sp_leases AS x (task, fence, token, state, gone, until, process, holder, acquired_at, presumed, previous)
    VALUES (t.n, old + 1, p_token, 'held', false, clock_timestamp() + seconds * interval '1 second', p_process, p_holder,
        {s}.sp_now_1(), guess, before)
    ON CONFLICT (task) DO UPDATE SET fence = excluded.fence, token = excluded.token, state = excluded.state, gone = excluded.gone,
        until = excluded.until, process = excluded.process, holder = excluded.holder, acquired_at = excluded.acquired_at,
        presumed = excluded.presumed, previous = excluded.previous;
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
