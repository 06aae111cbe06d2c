"""Every number of the worker that was tuned, with what it trades and what was measured.

Measured on two shared cores with PostgreSQL 15 unless it says otherwise; `make bench ARGS="delivery latency"` is how to
measure again after a change. Times are in seconds.
"""

from __future__ import annotations

# Storing outcomes ----------------------------------------------------------------------------------------------------
# Settling costs 16 us a message in large groups and many times that alone, so outcomes are stored in groups: when three
# quarters of the request slots have come back, or so long after the first of a group. Longer: fewer transactions, but
# what waits for a request slot waits too.
SETTLE_SECONDS = 0.002
# While there is more to claim than request slots, a group is worth waiting for.
SETTLE_SECONDS_UNDER_LOAD = 0.005
# While prefetched requests fill the slots, a late group holds nothing up.
SETTLE_SECONDS_PREFETCHED = 0.02
SETTLE_COUNT_PREFETCHED = 256
# In light traffic an outcome is stored in the transaction of the next claim, which saves one of two commits, unless
# that takes longer than this.
SETTLE_SECONDS_LIGHT = 0.05
# An outcome whose endpoint is locked is tried again after this, twice as long each time up to the longest: each try
# may wait for the lock and hold up everything else.
SETTLE_RETRY_SECONDS = 0.1
SETTLE_RETRY_LONGEST = 2.0
# Characters of captured responses that are stored at once. A backend takes about five times as much for them: ten
# answers of 64 kB to batches of 100 messages took 370 MB together.
RESPONSES_AT_ONCE = 4_000_000

# Claiming ------------------------------------------------------------------------------------------------------------
# A full claim takes messages of so many endpoints at most (ulak_private.claim() ends its walk there). Where they have
# too little to fill a claim, the next one may have twice as many, up to the most; where they fill it, half as many. Of
# endpoints with 2 messages each a claim of 32 takes 29 us a message, and one of 256 takes 19. Few: what a claim leaves
# of an endpoint's backlog costs another visit (20 messages each of 1,000 endpoints took 78 us with 32, and 71 with 16).
# But the fewer they are, the more messages go out before it is everybody's turn again.
CLAIM_ENDPOINTS = 16
CLAIM_ENDPOINTS_MOST = 256
# Messages claimed in one light turn, and how far the id of a delivered message may lie behind the newest to be stored
# by it. As many as wake-ups are asked for at once.
LIGHT_CLAIM = 16
# How often endpoints without prefetched requests get a full claim while others have some.
FULL_CLAIM_SECONDS = 0.02
# Where vacuum is held back, a full claim walks over dead index entries and may take long to find nothing. At most one
# part in so many of the worker's time goes into such claims, and it is never put off longer than this.
FULL_CLAIM_PARTS = 20
FULL_CLAIM_LONGEST = 1.0
# While the worker listens, retries and others that nobody notifies of are looked for so often; sooner after a claim
# that found some, since a rate-limited endpoint refills within milliseconds.
LISTENING_LOOK_SECONDS = 0.2
LISTENING_LOOK_SECONDS_AFTER_ONE = 0.05
# Payloads in memory; a claim takes fewer messages when they are big. What is unknown counts as a megabyte.
PAYLOAD_BYTES = 64 * 1024 * 1024
UNKNOWN_BYTES = 1024 * 1024
# What was claimed when the endpoint's circuit changed is given back for this long.
RELEASE_SECONDS = {"open": 10.0, "half_open": 5.0, "disabled": 10.0}

# Prefetching ---------------------------------------------------------------------------------------------------------
# A worker claims what an endpoint will have answered within this time, beyond what it has slots for. Shorter: slots run
# empty while a claim is made (20 us a message). Longer: a stopped worker gives more back.
PREFETCH_SECONDS = 0.05
# Of so many endpoints at most messages are prefetched by claims of their own. Where more than twice as many answer, one
# claim takes messages of whoever's turn it is, which costs less than a claim of each: with 1,000 endpoints a message
# took 160 us of processor with claims of their own and 128 us without.
PREFETCH_ENDPOINTS = 8
# An endpoint that had no answer for so long has no rate.
RATE_MEMORY_SECONDS = 0.25

# Request slots -------------------------------------------------------------------------------------------------------
# A request that takes longer makes its endpoint a slow one, which has slots of its own.
SLOW_SECONDS = 0.5
# Of the slow endpoints that have nothing under way so many are remembered: each claim is told about each of them. One
# that is forgotten takes a slot of the others until its next request is seen to be slow.
SLOW_REMEMBERED = 256
# Receivers that answer at once need no more requests in flight than these: libcurl and the kernel keep 15 kB for a
# connection, and those of so many stay in the processor's own cache.
LEAST_WINDOW = 32
# With a full window, prefetched requests wait so long for an answer before the window grows.
WINDOW_SECONDS = 0.001

# Looking for new messages --------------------------------------------------------------------------------------------
# How long traffic counts as flowing after a message: looks come at poll_interval_busy.
BUSY_SECONDS = 3.0
# How long a message that was sent but not yet seen is looked for: its sender may not have committed.
EXPECT_SECONDS = 0.1
# What the wait grows by from one idle look to the next.
IDLE_GROWTH = 1.25
# When messages are further apart than so many looks most looks are in vain, and come less often by this factor.
LIGHT_LOOKS = 6
LIGHT_WAIT = 1.5
# Without a new id a claim is made after so many of the longest waits: for retries and senders who committed late.
CLAIM_WAITS = 3
# Messages that come closer than this are better looked for; beyond, being notified by the sender is cheaper. NOTIFY
# takes a lock of the whole database at commit: with one per message 32 clients sent at a quarter of the rate.
LISTEN_GAP_SECONDS = 0.004
# How many senders notify after the worker has asked for it (ulak_private.request_wake_ups()).
WAKE_UPS = 16
# Other uses of NOTIFY wake the worker, too. So many vain wake-ups more than true ones, each of which makes up for a
# few, and it goes back to polling.
VAIN_WAKE_UPS = 200
TRUE_WAKE_UP_WORTH = 4

# Timers --------------------------------------------------------------------------------------------------------------
# A stop or a cancel is to be noticed within 200 ms. While nothing is held, cancels are noticed without this. Who
# listens is notified of a stop, and only makes sure.
CHECK_SECONDS = 0.1
CHECK_SECONDS_IDLE = 0.15
CHECK_SECONDS_LISTENING = 1.0
# After a wait of this length a listening worker looks whether it was cancelled; not sooner, since answers are due.
INTERRUPT_SECONDS = 0.05
REPORT_SECONDS = 1.0
# Statistics of an endpoint take 15 us to store: of so many endpoints a second they take 1.5% of a core. A worker that
# has sent to more of them keeps what it has counted for longer, but never longer than this.
STATISTICS_PER_SECOND = 1000
STATISTICS_LONGEST = 10.0
SWEEP_SECONDS = 10.0
# The longest wait without a return to PostgreSQL: neither a cancel nor the postmaster's death is seen inside of it.
LONGEST_WAIT = 0.1

# So long after its endpoint's longest time a delivery that its transport hasn't settled counts as lost, which never
# happens unless the transport has a defect. That is looked for five times as often.
OVERDUE_SECONDS = 5.0

# Leaving -------------------------------------------------------------------------------------------------------------
# How long a run may outlast its end because of what it holds. A request under way has its own time.
GRACE_SECONDS = 30.0
STOP_SECONDS = 2.0

# Python --------------------------------------------------------------------------------------------------------------
# Python looks for cycles after so many new objects (700 by default). A claim makes a thousand and more, and none of
# them is in a cycle.
CYCLE_SEARCH = 20_000
# Messages of which a text is longer than this are read one by one: a claim of 500 then brings at most 16 MB at once, of
# which PostgreSQL and PL/Python keep several copies, and one that can't be read costs the others of its claim nothing.
LARGE_MESSAGE = 32_768
# What one claim brings of those; the rest is left in the queue.
LARGE_TOGETHER = 32 * 1024 * 1024
# Files that PostgreSQL itself needs in a backend.
OTHER_FILES = 200

# Runs ----------------------------------------------------------------------------------------------------------------
# Notifications are kept for a session until it is idle, so one that runs for longer must not listen.
LONGEST_LISTENING_RUN = 3600
# A run ends at most 6.4 s after the minute, and what it holds may keep it a little longer: so long the next one waits
# for its place.
HANDOVER_SECONDS = 8.0
# How often it looks whether that is free, and the watcher whether it was cancelled.
LOOK_SECONDS = 0.1
# How often the watcher looks whether a worker is missing: one that is so twice in turn is started.
WATCH_SECONDS = 1.0

# After so many runs in turn that ended with an error of the worker's own code, the next one is wary: for so long it
# holds one message at a time, to find the one that causes it.
SUSPICIOUS = 2
WARY_SECONDS = 60.0
# Of messages that were held when a run ended with an error so many are named in the event log.
MOST_HELD_TOLD = 100

# Nodes ---------------------------------------------------------------------------------------------------------------
# A node's session is replaced after this: a backend keeps what it has learned of the catalog, so its memory grows.
NODE_SESSION_SECONDS = 3600.0
# How often a node that stop() has stopped looks whether start() was called.
STOPPED_LOOK_SECONDS = 1.0
# A server that says nothing for so long while it owes an answer is given up, and the primary is looked for. Shorter:
# a disk that stalls costs the node's session, and what it had delivered and not stored is sent again. Longer: it is
# missed for longer after a failover. Statements end sooner by the server's own limit (ulak_private.node_parameters()).
ANSWER_SECONDS = 10.0
# The server's time isn't taken from an answer that was so long under way.
CLOCK_SECONDS = 0.5
