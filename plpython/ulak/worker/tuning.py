"""All tuned numbers of the worker, with their trade-offs and what was measured. Times are in seconds.

Measured on two shared cores with PostgreSQL 15; `make bench ARGS="delivery breadth released"` measures again.
"""

from __future__ import annotations

# Turns. How close they may follow each other is the setting turn_interval. -------------------------------------------
# An outcome is stored after this at the latest. Longer: more is sent again after a crash, and a message in light
# traffic counts as under way for longer. Shorter: fewer are stored together, and one takes nearly as long as ten.
SETTLE_SECONDS = 0.2
# The same if another message may wait for the outcome (the next one of an ordering key, or under an in-flight limit)
# and other requests are under way.
SETTLE_SECONDS_AWAITED = 0.002
# This many outcomes are stored without waiting longer. If it were less than a claim takes, outcomes would have turns of
# their own, and a turn takes 1 ms, however few they are.
SETTLE_COUNT = 512
# How often an outcome whose endpoint is locked is tried again: each try may wait for the lock and hold up everything
# else.
SETTLE_RETRY_SECONDS = 1.0
# Characters of captured responses that are stored at once. A backend needs about five times as much memory for them:
# ten answers of 64 kB to batches of 100 messages took 370 MB in all.
RESPONSES_AT_ONCE = 4_000_000

# Claiming ------------------------------------------------------------------------------------------------------------
# New ids are looked at until they are at least this old: their senders may not have committed yet.
LATE_SECONDS = 0.05
# How often the worker looks for all that is due: retries, and messages whose senders committed late. More often for
# BUSY_SECONDS after a look that found some: a rate-limited endpoint saves no more than 0.1 s worth of messages. Later
# while nothing waits: a look takes 0.3 ms.
LOOK_SECONDS = 0.2
LOOK_SECONDS_OFTEN = 0.05
LOOK_SECONDS_EMPTY = 1.0
# A claim takes messages of at most this many endpoints. Fewer: slow receivers are found out later. More: a claim takes
# less of each backlog (a claim of 256 messages took 4.7 us a message more with 64 endpoints than with one, and 0.8 us
# more with 16). If these have too few messages to fill a claim, the next one takes messages of twice as many.
ENDPOINTS = 32
# A claim visits at most this many endpoints; a visit that finds nothing takes 8 us. While some endpoints have more, a
# look at the others visits fewer, and the next one comes BESIDE_SECONDS later: so 10,000 endpoints that have nothing
# are all visited within two seconds.
VISITS = 1000
VISITS_BESIDE = 200
BESIDE_SECONDS = 0.03
# Payloads in memory; a claim takes fewer messages when they are big. Before the first claim a message counts as 1 MB.
PAYLOAD_BYTES = 64 * 1024 * 1024
UNKNOWN_BYTES = 1024 * 1024
# When an endpoint's circuit changes, messages that wait for it here are given back, and aren't due again for this long.
RELEASE_SECONDS = {"open": 10.0, "half_open": 5.0, "disabled": 10.0}

# What a worker holds -------------------------------------------------------------------------------------------------
# A multiple of its request slots. Less: slots run empty during a turn, and there are more turns (with 4 a message took
# 1.05 times the processor time that it took with 6). More: a stopped worker gives more back, and others get less.
LOOK_AHEAD = 6
# A request that takes longer makes its endpoint a slow one, which has slots of its own.
SLOW_SECONDS = 0.5
# How many slow endpoints without requests are remembered: each one is passed to every claim. A forgotten one takes a
# slot of the quick lane until its next request turns out to be slow.
SLOW_REMEMBERED = 256

# Looking for new messages --------------------------------------------------------------------------------------------
# How long traffic counts as flowing after a message, and messages that weren't new after such a one.
BUSY_SECONDS = 3.0
# After a turn that got fewer messages than this the worker waits to be notified; else it looks. NOTIFY takes a
# server-wide lock at commit: with one per message, 32 clients sent at a quarter of the rate.
FEW = 2
# The next 16 senders are asked to notify, and asked again when fewer than this are left. Fewer: a few that roll back
# leave the worker asleep while others send. More: more turns ask.
LEAST_WAKE_UPS = 8

# Timers --------------------------------------------------------------------------------------------------------------
# A stop, a cancel or the postmaster's death must be noticed within 200 ms, so this is also the longest wait without a
# return to PostgreSQL. A listening worker is notified of a stop, and checks only as a safeguard.
CHECK_SECONDS = 0.1
CHECK_SECONDS_LISTENING = 1.0
REPORT_SECONDS = 1.0
# A report stores the statistics of at most this many endpoints. One takes 15 us, so they take 1.5% of a core.
STATISTICS_AT_ONCE = 1000
SWEEP_SECONDS = 10.0

# Leaving -------------------------------------------------------------------------------------------------------------
# How long a run may outlast its end because of messages it holds. Requests under way may take until their own time-out.
GRACE_SECONDS = 30.0
STOP_SECONDS = 2.0
