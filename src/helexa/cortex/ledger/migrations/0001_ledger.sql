-- Types are SQLite's; the PostgreSQL backend substitutes its own. Times are Unix milliseconds.

-- One row per running gateway. `batch` counts its commits and serves as heartbeat; all entries with seq < `low` are closed.
CREATE TABLE gateways (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    batch INTEGER NOT NULL,
    low INTEGER NOT NULL
) STRICT;

-- One row per window of a key. Window 0 is the balance; the id of a rolling window is the Unix second in which it began.
-- `spent` is the number of tokens charged to the window without those that are still counted in `leases`.
CREATE TABLE windows (
    key_id TEXT NOT NULL,
    window_id INTEGER NOT NULL,
    spent INTEGER NOT NULL,
    PRIMARY KEY (key_id, window_id)
) STRICT, WITHOUT ROWID;

-- Tokens that a gateway took from a window in advance, and how many of them are spent.
CREATE TABLE leases (
    key_id TEXT NOT NULL,
    window_id INTEGER NOT NULL,
    gateway INTEGER NOT NULL REFERENCES gateways (id),
    granted INTEGER NOT NULL,
    spent INTEGER NOT NULL,
    PRIMARY KEY (key_id, window_id, gateway)
) STRICT, WITHOUT ROWID;

-- One row per reservation: 'reserved', then 'settled', 'released', or 'orphaned' when its gateway died.
CREATE TABLE entries (
    gateway INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    account_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    window_id INTEGER NOT NULL,
    model TEXT NOT NULL,
    node TEXT,
    state TEXT NOT NULL,
    reserved INTEGER NOT NULL,
    charged INTEGER NOT NULL,
    prompt INTEGER NOT NULL,
    completion INTEGER NOT NULL,
    cached INTEGER NOT NULL,
    estimated INTEGER NOT NULL,
    reserved_ms INTEGER NOT NULL,
    closed_ms INTEGER,
    PRIMARY KEY (gateway, seq)
) STRICT, WITHOUT ROWID;

CREATE INDEX entries_reserved_ms ON entries (reserved_ms);

-- The newest finished requests, for users and operators.
CREATE TABLE activity (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL,
    started_ms INTEGER NOT NULL,
    account_id TEXT,
    key_id TEXT,
    api TEXT NOT NULL,
    model TEXT NOT NULL,
    alias TEXT,
    node TEXT,
    route TEXT,
    status INTEGER NOT NULL,
    error_code TEXT,
    prompt INTEGER NOT NULL,
    completion INTEGER NOT NULL,
    cached INTEGER NOT NULL,
    ttft_ms REAL,
    duration_ms REAL NOT NULL,
    waited_ms REAL NOT NULL,
    tokens_per_second REAL,
    client_gone INTEGER NOT NULL
) STRICT;
