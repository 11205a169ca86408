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
    client_gone INTEGER NOT NULL,
    client TEXT
) STRICT;

-- API keys. `digest` is the SHA-256 of the secret. `models` is a JSON list, NULL for all. Times are Unix seconds.
CREATE TABLE keys (
    key_id TEXT PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    hint TEXT NOT NULL,
    account_id TEXT NOT NULL,
    role TEXT NOT NULL,
    models TEXT,
    hard_cap INTEGER,
    window_kind TEXT NOT NULL,
    window_seconds INTEGER NOT NULL,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    concurrency INTEGER,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT;

-- One row that counts changes of keys: gateways poll it, and reload the keys when it changes.
CREATE TABLE key_changes (count INTEGER NOT NULL) STRICT;

INSERT INTO key_changes VALUES (0);

-- Nodes that joined with an invitation. The gateway sends `bearer`, the key of the node, so it is not hashed.
CREATE TABLE nodes (
    name TEXT PRIMARY KEY,
    endpoint TEXT NOT NULL UNIQUE,
    bearer TEXT NOT NULL,
    joined_at REAL NOT NULL
) STRICT;

-- Invitations that no node has used yet. `digest` is the SHA-256 of the token. `networks` is a JSON list.
CREATE TABLE invitations (
    digest BLOB PRIMARY KEY,
    hint TEXT NOT NULL,
    node TEXT,
    networks TEXT NOT NULL,
    expires_at REAL NOT NULL
) STRICT;

-- One row that counts changes of nodes: gateways poll it, and read the nodes again when it changes.
CREATE TABLE node_changes (count INTEGER NOT NULL) STRICT;

INSERT INTO node_changes VALUES (0);
