-- The rules of `lease/rules.py` in the dialect that runs on the server; `tests/conformance/test_model.py` holds them equal.
-- PostgreSQL 14 or newer. Everything lives in one schema. A role that does not own it needs:
--   GRANT USAGE ON SCHEMA grel TO app;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA grel TO app;
--   GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA grel TO app;
--
-- Times are microseconds since 1970 as bigint: no session's TimeZone or DateStyle can change what they mean.
-- A function that was published never changes: what is new gets the next number, so that old and new processes can share
-- the tables during a deploy. All of this belongs in one transaction, and may be run again.
--
-- Why the tables do not bloat. A lease is one row that is updated in place: no index but the key's, and half of every
-- page kept free, so that each update is a HOT one, whose dead versions the next visitor of the page clears away without
-- VACUUM. An index on the time to forget would end that. So one write in eight looks through one page of the table, by
-- its physical place, and deletes what is due there: names go as fast as they come, at the price of reading one page.

DO $do$ BEGIN
  -- IF NOT EXISTS asks for the right to create schemas even where it exists.
  IF to_regnamespace('grel') IS NULL THEN CREATE SCHEMA grel; END IF;
  IF to_regtype('grel.waiter') IS NULL THEN
    CREATE TYPE grel.waiter AS (token text, until bigint, shared boolean, channel text, called boolean);
  END IF;
END $do$;

CREATE TABLE IF NOT EXISTS grel.lease (
  key         text PRIMARY KEY,
  fence       bigint NOT NULL,        -- the last one given out
  holder      text,                   -- null while nobody holds it alone
  lapsed      boolean NOT NULL,       -- the last exclusive lease ran out instead of being given back
  until       bigint NOT NULL,        -- of the exclusive lease
  ended       bigint NOT NULL,
  transitions bigint NOT NULL,
  latest      bigint NOT NULL,        -- when the last shared lease runs out; 0 without any
  line        grel.waiter[] NOT NULL, -- who waits, first come first
  duration    bigint NOT NULL,
  since       bigint NOT NULL,
  renewed     bigint NOT NULL,
  meta        text NOT NULL,          -- JSON
  mark        bigint,
  last        bigint NOT NULL,        -- when the last claim, or place in line, ended or ends
  keep        bigint NOT NULL         -- for so long after that the row counts as present
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

-- Shared leases, of which a call touches two at most however many there are: its own, and the one that runs out last.
-- The second index costs HOT here, which is why it is not on `lease`.
CREATE TABLE IF NOT EXISTS grel.reader (
  key   text NOT NULL,
  token text NOT NULL,
  until bigint NOT NULL,
  PRIMARY KEY (key, token)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
CREATE INDEX IF NOT EXISTS reader_until ON grel.reader (key, until);

-- The page to look through next.
CREATE SEQUENCE IF NOT EXISTS grel.page;

-- The format of the records. A library refuses one that is newer than it knows.
CREATE TABLE IF NOT EXISTS grel.format (version integer NOT NULL);
INSERT INTO grel.format SELECT 1 WHERE NOT EXISTS (SELECT FROM grel.format);

-- Who in line may come in: the readers whose turn it is, else the first writer, else all.
CREATE OR REPLACE FUNCTION grel.heirs_v1(held boolean, latest bigint, line grel.waiter[]) RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(array_agg(w.token), '{}')
  FROM unnest(line) WITH ORDINALITY AS w (token, until, shared, channel, called, place), (
    SELECT bool_or(x.called) AS called, min(x.place) FILTER (WHERE NOT x.shared) AS writer
    FROM unnest(line) WITH ORDINALITY AS x (token, until, shared, channel, called, place)
  ) AS all_of
  WHERE NOT held
    AND (w.called OR NOT all_of.called AND (all_of.writer IS NULL OR w.place = all_of.writer AND latest = 0))
$$;

-- The line after the exclusive claim ended: readers that waited for it get their turn.
CREATE OR REPLACE FUNCTION grel.called_v1(line grel.waiter[]) RETURNS grel.waiter[] LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(array_agg(ROW(w.token, w.until, w.shared, w.channel, w.shared)::grel.waiter ORDER BY w.place), '{}')
  FROM unnest(line) WITH ORDINALITY AS w (token, until, shared, channel, called, place)
$$;

-- The line after an exclusive claim began: readers who missed their turn wait for the next one.
CREATE OR REPLACE FUNCTION grel.uncalled_v1(line grel.waiter[]) RETURNS grel.waiter[] LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(array_agg(ROW(w.token, w.until, w.shared, w.channel, false)::grel.waiter ORDER BY w.place), '{}')
  FROM unnest(line) WITH ORDINALITY AS w (token, until, shared, channel, called, place)
$$;

-- The line with `new` at its end, or with a longer stay for who is in it already.
CREATE OR REPLACE FUNCTION grel.enqueued_v1(line grel.waiter[], new grel.waiter) RETURNS grel.waiter[]
LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN bool_or(w.token = new.token) THEN array_agg(
    CASE WHEN w.token = new.token THEN ROW(w.token, new.until, w.shared, new.channel, w.called)::grel.waiter
    ELSE ROW(w.token, w.until, w.shared, w.channel, w.called)::grel.waiter END ORDER BY w.place
  ) ELSE line || new END
  FROM unnest(line) WITH ORDINALITY AS w (token, until, shared, channel, called, place)
$$;

-- The line without `me` and without those whose place ran out at or before `instant`.
CREATE OR REPLACE FUNCTION grel.without_v1(line grel.waiter[], me text, instant bigint) RETURNS grel.waiter[]
LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(array_agg(ROW(w.token, w.until, w.shared, w.channel, w.called)::grel.waiter ORDER BY w.place), '{}')
  FROM unnest(line) WITH ORDINALITY AS w (token, until, shared, channel, called, place)
  WHERE w.token IS DISTINCT FROM me AND w.until > instant
$$;

-- When the last of the others' shared leases runs out. Sorting is off so that the index is read from its end: for a
-- planner that expects one reader, reading and sorting them all is as good.
CREATE OR REPLACE FUNCTION grel.latest_v1(k text, me text, instant bigint) RETURNS bigint LANGUAGE plpgsql STABLE
SET enable_sort = off AS $$
BEGIN
  RETURN (
    SELECT r.until FROM grel.reader r WHERE r.key = k AND r.token <> me AND r.until > instant
    ORDER BY r.until DESC LIMIT 1
  );
END $$;

-- Deletes what is due on one page of `lease`. It waits for nobody, so that it can be part of any transaction.
CREATE OR REPLACE FUNCTION grel.sweep_v1(instant bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  page bigint := nextval('grel.page') - 1;
BEGIN
  IF page >= pg_relation_size('grel.lease') / current_setting('block_size')::int THEN
    PERFORM setval('grel.page', 1, false);
    RETURN;
  END IF;
  WITH due AS (
    SELECT l.key FROM grel.lease l
    WHERE l.ctid >= format('(%s,0)', page)::tid AND l.ctid < format('(%s,0)', page + 1)::tid AND l.last + l.keep <= instant
    FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM grel.lease l USING due WHERE l.key = due.key RETURNING l.key
  )
  DELETE FROM grel.reader r USING gone WHERE r.key = gone.key;
END $$;

-- What is kept for `k`, as it is: the one who asks settles it. A row's names are the columns'.
CREATE OR REPLACE FUNCTION grel.peek_v1(k text) RETURNS text LANGUAGE sql VOLATILE AS $$
  SELECT json_build_object(
    'now', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    'lease', (SELECT to_json(l) FROM grel.lease l WHERE l.key = k),
    'readers', (SELECT json_object_agg(r.token, r.until) FROM grel.reader r WHERE r.key = k)
  )::text
  WHERE NOT pg_is_in_recovery()
$$;

-- Runs a rule. `amount` is a duration, for `release` the least one, for `advance` the mark. The answer is null, {no or yes}
-- of release and advance, {1, fence, lapsed, transitions} of a grant, or {0, remaining} of a refusal.
--
-- What may well be refused is looked at without a lock first: a refusal writes nothing, waits for nobody and costs no
-- transaction number. Then the row is locked, the clock read, and the rule decided on what is there by then. Further
-- rounds are for those who lost a race for a new key. Few and plain statements, since each is prepared anew at every call.
CREATE OR REPLACE FUNCTION grel.apply_v1(
  verb text, k text, keep bigint, me text, amount bigint, as_reader boolean, queue bigint, wake text, head_start bigint,
  extra text
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  l grel.lease;
  instant bigint;
  stored boolean;            -- whether there is a row
  stale boolean;             -- whether readers of before may be left
  held boolean;              -- by `me`, alone
  reads boolean := false;    -- `me` holds it with others
  queued boolean := false;   -- `me` is in line
  heirs text[] := '{}';      -- before the rule
  share bigint;              -- until when `me` reads from now on; 0 for no longer, null for no change
  remaining bigint;
  answer bigint[];
BEGIN
  -- On a replica nothing may be answered from what it has: the lock fails there.
  FOR round IN CASE WHEN verb IN ('take', 'advance') AND NOT pg_is_in_recovery() THEN 1 ELSE 2 END .. 1000 LOOP
    IF round = 1 THEN
      SELECT * INTO l FROM grel.lease x WHERE x.key = k;
      -- Nobody is in the way.
      CONTINUE WHEN l.key IS NULL OR verb = 'take' AND l.holder IS NULL AND l.latest = 0 AND cardinality(l.line) = 0;
    ELSE
      SELECT * INTO l FROM grel.lease x WHERE x.key = k FOR NO KEY UPDATE;
    END IF;
    stored := l.key IS NOT NULL;
    instant := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
    stale := l.latest > 0;

    -- What is due to be forgotten counts as absent, by the retention of the one who asks.
    IF NOT stored OR instant >= l.last + apply_v1.keep THEN
      l := ROW(k, 0, NULL, false, 0, 0, 0, 0, '{}', 0, 0, 0, '{}', NULL, 0, 0);
    END IF;

    -- What ran out is gone.
    IF l.until <= instant AND l.holder IS NOT NULL THEN
      l.holder := NULL;
      l.lapsed := true;
      l.ended := l.until;
      IF cardinality(l.line) > 0 THEN l.line := grel.called_v1(l.line); END IF;
    END IF;
    IF l.latest > 0 THEN
      IF l.latest <= instant THEN
        l.ended := greatest(l.ended, l.latest);
        l.latest := 0;
      ELSE
        reads := coalesce((SELECT r.until FROM grel.reader r WHERE r.key = k AND r.token = me) > instant, false);
      END IF;
    END IF;
    IF cardinality(l.line) > 0 THEN
      l.line := grel.without_v1(l.line, NULL, instant);
      queued := EXISTS (SELECT FROM unnest(l.line) w WHERE w.token = me);
      heirs := grel.heirs_v1(l.holder IS NOT NULL, l.latest, l.line);
    END IF;
    held := l.holder IS NOT NULL AND l.holder = me;

    -- The rules. One that changes nothing returns.
    IF verb = 'release' THEN
      IF NOT (held OR reads OR queued) THEN RETURN ARRAY[0]; END IF;
      answer := ARRAY[(held OR reads)::int];
      IF queued THEN l.line := grel.without_v1(l.line, me, instant); END IF;
      IF held AND amount > 0 AND l.since + amount > instant THEN
        l.until := l.since + amount;
      ELSIF held THEN
        l.holder := NULL;
        l.ended := instant;
      ELSIF reads THEN
        share := 0;
        l.ended := instant;
      END IF;

    ELSIF verb = 'advance' THEN
      IF amount <= l.mark THEN RETURN ARRAY[0]; END IF;
      answer := ARRAY[1];
      l.mark := amount;
      l.ended := instant;

    ELSIF verb = 'downgrade' THEN
      IF NOT held THEN RETURN NULL; END IF;
      l.holder := NULL;
      l.ended := instant;
      share := instant + amount;

    ELSIF held THEN
      l.until := instant + amount;
      l.duration := amount;
      l.renewed := instant;

    ELSIF reads THEN
      share := instant + amount;

    ELSIF verb = 'renew' THEN
      RETURN NULL;

    ELSE -- take
      IF l.holder IS NOT NULL THEN
        remaining := l.until - instant;
      ELSIF as_reader THEN
        IF me <> ALL (heirs) THEN
          remaining := (SELECT max(w.until) FROM unnest(l.line) w WHERE NOT w.shared) - instant;
        END IF;
      ELSIF l.latest > 0 THEN
        remaining := l.latest - instant;
      ELSIF cardinality(heirs) > 0 AND me <> ALL (heirs) AND instant < l.ended + head_start THEN
        remaining := l.ended + head_start - instant;
      END IF;

      IF remaining IS NOT NULL THEN
        answer := ARRAY[0, remaining];
        IF queue = 0 THEN RETURN answer; END IF;
        PERFORM set_config('synchronous_commit', 'off', true); -- for a place in line, nobody waits for the disk
        l.line := grel.enqueued_v1(l.line, ROW(me, instant + queue, as_reader, wake, false)::grel.waiter);
      ELSE
        IF queued THEN l.line := grel.without_v1(l.line, me, instant); END IF;
        IF as_reader THEN
          share := instant + amount;
        ELSE
          answer := ARRAY[
            1, greatest(l.fence + 1, instant), l.lapsed::int, CASE WHEN l.fence > 0 THEN l.transitions + 1 ELSE 0 END
          ];
          l := ROW(
            k, answer[2], me, false, instant + amount, l.ended, answer[4], 0, l.line, amount, instant, instant, extra,
            l.mark, 0, 0
          );
          -- Who missed the turn waits for the next one.
          IF cardinality(l.line) > 0 THEN l.line := grel.uncalled_v1(l.line); END IF;
        END IF;
      END IF;
    END IF;

    IF round = 1 THEN
      reads := false;
      queued := false;
      heirs := '{}';
      share := NULL;
      remaining := NULL;
      answer := NULL;
      CONTINUE;
    END IF;

    IF share IS NOT NULL THEN
      l.latest := greatest(share, grel.latest_v1(k, me, instant));
    END IF;
    l.last := greatest(l.ended, l.latest, CASE WHEN l.holder IS NOT NULL THEN l.until END);
    IF cardinality(l.line) > 0 THEN
      IF held AND l.holder IS NULL THEN l.line := grel.called_v1(l.line); END IF;
      l.last := greatest(l.last, (SELECT max(w.until) FROM unnest(l.line) w));
      -- Tells those who may come in now and could not before. Without a waiter nothing is sent: a commit that notifies
      -- waits for every other one that does.
      PERFORM pg_notify(w.channel, k) FROM unnest(l.line) w
      WHERE w.channel <> '' AND w.token <> ALL (heirs)
        AND w.token = ANY (grel.heirs_v1(l.holder IS NOT NULL, l.latest, l.line));
    END IF;

    IF stored THEN
      UPDATE grel.lease x SET
        fence = l.fence, holder = l.holder, lapsed = l.lapsed, until = l.until, ended = l.ended,
        transitions = l.transitions, latest = l.latest, line = l.line, duration = l.duration, since = l.since,
        renewed = l.renewed, meta = l.meta, mark = l.mark, last = l.last, keep = apply_v1.keep
      WHERE x.key = k;
    ELSE
      INSERT INTO grel.lease (
        key, fence, holder, lapsed, until, ended, transitions, latest, line, duration, since, renewed, meta, mark, last, keep
      ) VALUES (
        k, l.fence, l.holder, l.lapsed, l.until, l.ended, l.transitions, l.latest, l.line, l.duration, l.since, l.renewed,
        l.meta, l.mark, l.last, apply_v1.keep
      ) ON CONFLICT (key) DO NOTHING;
      IF NOT FOUND THEN
        answer := NULL;
        share := NULL;
        remaining := NULL;
        CONTINUE;
      END IF;
    END IF;

    IF stale OR share > 0 THEN
      DELETE FROM grel.reader r WHERE r.key = k AND r.until <= instant;
      IF share > 0 THEN
        INSERT INTO grel.reader VALUES (k, me, share) ON CONFLICT (key, token) DO UPDATE SET until = excluded.until;
      ELSIF share = 0 THEN
        DELETE FROM grel.reader r WHERE r.key = k AND r.token = me;
      END IF;
    END IF;
    IF random() < 0.125 THEN PERFORM grel.sweep_v1(instant); END IF;
    RETURN coalesce(answer, ARRAY[1, l.fence, 0, l.transitions]);
  END LOOP;
  RAISE serialization_failure USING MESSAGE = 'the lease changed too often';
END $$;
