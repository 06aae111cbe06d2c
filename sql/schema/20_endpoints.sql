-- Endpoints: where messages go, how to reach it, and how it has been doing lately. Secrets live apart from configs.

-- The breaker and the rate limit rewrite a row often; half-empty pages and no index on a column that they touch keep
-- those updates HOT. Ids stay within integer because the advisory locks per endpoint take a 4-byte key.
create table ulak.endpoints (
    id bigint generated always as identity (maxvalue 2147483647) primary key,
    name text not null unique,
    protocol text not null,
    config jsonb not null,
    retry_policy jsonb,
    enabled boolean not null default true,
    description text,
    circuit_state text not null default 'closed' check (circuit_state in ('closed', 'open', 'half_open')),
    circuit_failure_count integer not null default 0,
    circuit_opened_at timestamptz,
    circuit_half_open_at timestamptz,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    config_version bigint not null default 1,
    max_in_flight integer generated always as ((config -> 'max_in_flight')::integer) stored,
    rate_tokens double precision,
    rate_refilled_at timestamptz,
    release_rate double precision,
    release_before timestamptz,
    circuit_probe_id bigint,
    circuit_probe_attempt integer,
    circuit_window_started_at timestamptz,
    circuit_window_requests integer,
    circuit_window_failures integer,
    last_error text,
    slow_start_limit integer,
    max_pending integer,
    circuit_broken_since timestamptz,
    is_restricted boolean not null default false,
    failing_since timestamptz,
    failing_told smallint
)
with (fillfactor = 50);

comment on table ulak.endpoints is 'where messages are delivered to: one row per receiver, with its configuration and the state of its circuit breaker';
comment on column ulak.endpoints.id is 'number of the endpoint; ulak.queue.endpoint_id refers to it';
comment on column ulak.endpoints.name is 'unique name, the one that ulak.send() is given';
comment on column ulak.endpoints.protocol is 'a worker delivers (http, log, or that of a broker), or external workers call ulak.claim() (pull)';
comment on column ulak.endpoints.config is 'how to reach the receiver. Validated key by key; {"$secret": "name"} stands for a value in ulak_private.secrets';
comment on column ulak.endpoints.retry_policy is 'overrides of the retry settings for this endpoint; null or a missing key means the setting';
comment on column ulak.endpoints.enabled is 'false: messages are accepted and held, none is claimed';
comment on column ulak.endpoints.description is 'free text for people';
comment on column ulak.endpoints.circuit_state is 'closed: traffic flows. open: nothing is claimed until circuit_half_open_at. half_open: one probe is under way';
comment on column ulak.endpoints.circuit_failure_count is 'consecutive failures that counted; any success sets it to 0';
comment on column ulak.endpoints.circuit_opened_at is 'when the breaker last opened; null while it is closed';
comment on column ulak.endpoints.circuit_half_open_at is 'when an open breaker may send its next probe';
comment on column ulak.endpoints.last_success_at is 'last delivery that succeeded, exact to about ten seconds';
comment on column ulak.endpoints.last_failure_at is 'last delivery that failed';
comment on column ulak.endpoints.created_at is 'when the endpoint was created';
comment on column ulak.endpoints.updated_at is 'when name, protocol, config, retry_policy or description last changed';
comment on column ulak.endpoints.config_version is 'rises with each change of config, retry_policy, a secret that the config names, or the body of a subscription; workers cache by it';
comment on column ulak.endpoints.max_in_flight is 'the config''s max_in_flight, unpacked for the claim';
comment on column ulak.endpoints.rate_tokens is 'tokens left in the rate limit''s bucket at rate_refilled_at';
comment on column ulak.endpoints.rate_refilled_at is 'when rate_tokens was last computed';
comment on column ulak.endpoints.release_rate is 'messages a second while a held backlog is released by enable_endpoint(); null: no such limit';
comment on column ulak.endpoints.release_before is 'messages that were due before this are that backlog';
comment on column ulak.endpoints.circuit_probe_id is 'message that probes a half-open breaker, or did so last';
comment on column ulak.endpoints.circuit_probe_attempt is 'attempt number of that probe, so that an older attempt of the same message doesn''t count';
comment on column ulak.endpoints.circuit_window_started_at is 'start of the breaker''s current window (failure-rate mode)';
comment on column ulak.endpoints.circuit_window_requests is 'outcomes counted in that window';
comment on column ulak.endpoints.circuit_window_failures is 'failures among them';
comment on column ulak.endpoints.slow_start_limit is 'most messages in flight while a circuit that has closed is eased back into traffic; null: no such limit';
comment on column ulak.endpoints.max_pending is 'most messages that may wait for it: the config''s max_pending, else the setting; null: any number';
comment on column ulak.endpoints.circuit_broken_since is 'since when the breaker has not been closed; null while it is';
comment on column ulak.endpoints.is_restricted is 'true: only roles with a grant may send to it';
comment on column ulak.endpoints.failing_since is 'first failure after the last success, for endpoints with disable_after; exact to a minute';
comment on column ulak.endpoints.failing_told is 'how much of disable_after was over when subscribers were told last: 50 or 90 percent; 100: it was disabled by it';

-- Few endpoints are of either kind: publish() asks for them among thousands of subscribers.
create index endpoints_restricted_idx on ulak.endpoints (id) where is_restricted;
create index endpoints_max_pending_idx on ulak.endpoints (id) where max_pending is not null;
-- So does archive_rows().
create index endpoints_announcing_idx on ulak.endpoints (id) where config ? 'announce';
comment on column ulak.endpoints.last_error is 'the error of last_failure_at';

-- For endpoints with max_pending: up to which message id a send needs no look at the waiting messages. A table of its own, because
-- a session that has written it keeps it locked until it commits, and the breaker needs the endpoint's row.
create table ulak_private.endpoint_headroom (
    endpoint_id bigint primary key references ulak.endpoints (id) on delete cascade,
    safe_to bigint not null default 0
);

comment on table ulak_private.endpoint_headroom is 'how far send() may go without probing what waits for an endpoint; private to ulak';
comment on column ulak_private.endpoint_headroom.endpoint_id is 'an endpoint with max_pending';
comment on column ulak_private.endpoint_headroom.safe_to is 'messages with ids up to this one fit for certain';

-- Granted to nobody: only SECURITY DEFINER functions of the extension read it.
create table ulak_private.secrets (
    name text primary key,
    value text not null,
    previous_value text,
    previous_until timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    hosts text,
    check ((previous_value is null) = (previous_until is null))
);

comment on table ulak_private.secrets is 'values that configs refer to as {"$secret": "name"}. No role may read it; write with ulak.set_secret() and ulak.rotate_secret()';
comment on column ulak_private.secrets.name is 'the name that a config uses';
comment on column ulak_private.secrets.value is 'the secret itself';
comment on column ulak_private.secrets.previous_value is 'the secret before the last rotation; it goes on signing until previous_until';
comment on column ulak_private.secrets.previous_until is 'end of the rotation''s grace';
comment on column ulak_private.secrets.created_at is 'when the secret was first set';
comment on column ulak_private.secrets.updated_at is 'when it was last set or rotated';
comment on column ulak_private.secrets.hosts is 'the only hosts that may learn of it, separated by commas; null: any';
