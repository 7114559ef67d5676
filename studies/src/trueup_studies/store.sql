-- The tables of a store of results, schema 2.
CREATE TABLE trueup_store (schema INTEGER NOT NULL);
CREATE TABLE cells (
    key TEXT PRIMARY KEY,
    study TEXT NOT NULL,
    version INTEGER NOT NULL,
    settings TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('finished', 'failed')),
    error TEXT NOT NULL,
    seconds REAL NOT NULL,
    machine TEXT NOT NULL DEFAULT '',
    software TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE rows (
    key TEXT NOT NULL REFERENCES cells (key),
    number INTEGER NOT NULL,
    row TEXT NOT NULL,
    PRIMARY KEY (key, number)
) WITHOUT ROWID;
CREATE INDEX cells_by_study ON cells (study, version);
