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
