-- Columns that end with `_ms` are times in UTC epoch milliseconds. Columns that end with `_s` are durations in seconds.
-- Every table has a natural key: columns with a UNIQUE or PRIMARY KEY constraint that identify the same row in any
-- database.

CREATE TABLE build (
    id INTEGER PRIMARY KEY,
    engine TEXT NOT NULL,
    sha TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    sha_long TEXT NOT NULL,
    version TEXT NOT NULL,
    dirty INTEGER,
    built_ms INTEGER,
    facts TEXT NOT NULL DEFAULT '{}',
    first_seen_ms INTEGER NOT NULL,
    UNIQUE (engine, sha, fingerprint)
) STRICT;

CREATE TABLE host (
    id INTEGER PRIMARY KEY,
    hostname TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    os TEXT NOT NULL,
    kernel TEXT NOT NULL,
    cpu TEXT NOT NULL,
    cpu_cores INTEGER NOT NULL,
    memory_total_mb INTEGER NOT NULL,
    driver_version TEXT NOT NULL,
    cuda_version TEXT NOT NULL,
    gpus TEXT NOT NULL DEFAULT '[]', -- [{"name", "vram_total_mb"}]
    first_seen_ms INTEGER NOT NULL,
    UNIQUE (hostname, fingerprint)
) STRICT;

CREATE TABLE target (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    label TEXT NOT NULL
) STRICT;

CREATE TABLE model (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    config_hash TEXT NOT NULL,
    config TEXT NOT NULL DEFAULT '{}',
    first_seen_ms INTEGER NOT NULL,
    UNIQUE (name, config_hash)
) STRICT;

CREATE TABLE scenario (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    params_hash TEXT NOT NULL,
    kind TEXT NOT NULL,
    params TEXT NOT NULL DEFAULT '{}',
    UNIQUE (name, params_hash)
) STRICT;

-- One row is one sample. Columns are medians over the requests of the sample, unless the comment says otherwise.
-- `metrics` contains all metrics with percentiles and number of values.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE, -- `live:` and a random id, or `runs:` and a hash of the imported row
    target_id INTEGER NOT NULL REFERENCES target (id),
    host_id INTEGER NOT NULL REFERENCES host (id),
    build_id INTEGER NOT NULL REFERENCES build (id),
    model_id INTEGER NOT NULL REFERENCES model (id),
    scenario_id INTEGER NOT NULL REFERENCES scenario (id),
    started_ms INTEGER NOT NULL,
    duration_s REAL NOT NULL,
    bench_version TEXT NOT NULL,
    seed INTEGER, -- random seed of prompts and arrival times
    ok INTEGER NOT NULL CHECK (ok IN (0, 1)),
    error TEXT,
    estimated INTEGER NOT NULL DEFAULT 0 CHECK (estimated IN (0, 1)), -- tokens were counted by chunks
    requests INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    rejected INTEGER NOT NULL DEFAULT 0,
    timed_out INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    incomplete INTEGER NOT NULL DEFAULT 0,
    concurrency INTEGER, -- closed loop: requests in flight
    rate_rps REAL, -- open loop: requests sent per second
    prompt_tokens REAL,
    cached_tokens REAL,
    completion_tokens REAL,
    ttft_s REAL,
    ttft_p95_s REAL,
    ttfo_s REAL,
    tpot_s REAL,
    icl_s REAL,
    e2e_s REAL,
    e2e_p95_s REAL,
    output_tps_user REAL,
    output_tps REAL, -- total of all requests
    prefill_tps REAL,
    prefill_s REAL, -- reported by the server
    decode_s REAL, -- reported by the server
    queue_s REAL,
    goodput_rps REAL,
    goodput_share REAL, -- share of all sent requests that met all latency objectives, 0 to 1
    unload_s REAL,
    load_s REAL,
    release_s REAL, -- from the disconnect until the server released the request
    score REAL, -- score of automatic checks, 0 to 1. Scores that users set are in the table `score`.
    vram_used_mb INTEGER,
    gpu_util_pct REAL,
    gpu_temp_c REAL,
    artifact TEXT, -- stored response, for example of a capability probe
    metrics TEXT NOT NULL DEFAULT '{}'
) STRICT;
CREATE INDEX run_cell ON run (target_id, model_id, scenario_id, build_id, host_id, ok, started_ms);
CREATE INDEX run_started ON run (started_ms);
CREATE INDEX run_build ON run (build_id);

-- `scheduled_s`, `sent_s` and `ended_s` are seconds from the start of the sample on the client's monotonic clock.
CREATE TABLE request (
    run_id INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    role TEXT NOT NULL, -- `load`, `probe`, `turn`
    status TEXT NOT NULL, -- `ok`, `rejected`, `timeout`, `error`, `incomplete`, `cancelled`
    http_status INTEGER,
    error TEXT,
    finish_reason TEXT,
    scheduled_s REAL NOT NULL,
    sent_s REAL NOT NULL,
    ended_s REAL NOT NULL,
    ttft_s REAL,
    ttfo_s REAL,
    tpot_s REAL,
    e2e_s REAL,
    prefill_s REAL,
    decode_s REAL,
    queue_s REAL,
    prompt_tokens INTEGER,
    cached_tokens INTEGER,
    completion_tokens INTEGER,
    reasoning_tokens INTEGER,
    estimated INTEGER NOT NULL DEFAULT 0,
    chunks BLOB, -- encoded arrival times of the chunks; see `pack` in sample_to_rows.py
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE telemetry (
    run_id INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    at_s REAL NOT NULL,
    device INTEGER NOT NULL,
    vram_used_mb INTEGER,
    utilization_pct REAL,
    temp_c REAL,
    PRIMARY KEY (run_id, at_s, device)
) STRICT, WITHOUT ROWID;

CREATE TABLE score (
    run_id INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    scorer TEXT NOT NULL,
    score REAL NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (run_id, scorer)
) STRICT, WITHOUT ROWID;

CREATE TABLE alert (
    id INTEGER PRIMARY KEY,
    target_id INTEGER NOT NULL REFERENCES target (id),
    host_id INTEGER NOT NULL REFERENCES host (id),
    build_id INTEGER NOT NULL REFERENCES build (id),
    model_id INTEGER NOT NULL REFERENCES model (id),
    scenario_id INTEGER NOT NULL REFERENCES scenario (id),
    metric TEXT NOT NULL,
    state TEXT NOT NULL, -- `suspected` (more samples are being taken), `confirmed`, `dismissed`
    verdict TEXT NOT NULL, -- `improved`, `regressed`
    ratio REAL NOT NULL, -- new median / median of the baseline
    ratio_low REAL NOT NULL,
    ratio_high REAL NOT NULL,
    threshold REAL NOT NULL, -- smallest |ratio - 1| that counts as a change
    samples INTEGER NOT NULL,
    baseline_samples INTEGER NOT NULL,
    baseline_builds TEXT NOT NULL DEFAULT '[]', -- ids of builds
    raised_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    delivered_ms INTEGER, -- time at which the webhook accepted the alert
    UNIQUE (target_id, host_id, build_id, model_id, scenario_id, metric)
) STRICT;

CREATE VIEW cell_stats AS
SELECT
    run.target_id, run.host_id, run.build_id, run.model_id, run.scenario_id,
    sum(run.ok) AS samples,
    count(*) - sum(run.ok) AS failures,
    min(run.started_ms) AS first_ms,
    max(run.started_ms) AS last_ms,
    max(CASE WHEN run.ok THEN run.started_ms END) AS last_ok_ms
FROM run
GROUP BY run.target_id, run.host_id, run.build_id, run.model_id, run.scenario_id;

-- The benchmark configuration that was measured last, for each target, model name and scenario name.
CREATE VIEW latest_cell AS
SELECT target_id, host_id, build_id, model_id, scenario_id, samples, failures, first_ms, last_ms, last_ok_ms
FROM (
    SELECT
        cell_stats.*,
        row_number() OVER (
            PARTITION BY cell_stats.target_id, model.name, scenario.name
            ORDER BY cell_stats.samples > 0 DESC, cell_stats.last_ms DESC
        ) AS place
    FROM cell_stats
    JOIN model ON model.id = cell_stats.model_id
    JOIN scenario ON scenario.id = cell_stats.scenario_id
)
WHERE place = 1;
