-- One row is one job: pay amount to account.
CREATE TABLE IF NOT EXISTS transfers (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account   text   NOT NULL,
    amount    bigint NOT NULL,
    status    text   NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'inprog', 'done', 'failed')),
    lease     text,                      -- whose run it is: the ID of the library's lease, which is the Key of its orphan
    fence     bigint NOT NULL DEFAULT 0, -- number of the last run; grows with every marking
    marked_at timestamptz,
    note      text,                      -- why it failed
    CHECK ((status = 'inprog') = (lease IS NOT NULL))
);

-- What workers look for. Rows that are done are not in it.
CREATE INDEX IF NOT EXISTS transfers_pending ON transfers (id) WHERE status = 'pending';

-- What a run does: money that arrived. Nothing here keeps a transfer from being paid twice; that is the workers' to prove.
CREATE TABLE IF NOT EXISTS payments (
    transfer bigint NOT NULL,
    fence    bigint NOT NULL,
    account  text   NOT NULL,
    amount   bigint NOT NULL
);
