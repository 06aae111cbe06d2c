"""All tuned numbers of the worker, with their trade-offs and what was measured. Times are in seconds.

Measured on two shared cores with PostgreSQL 15; `make bench ARGS="delivery breadth released"` measures again.
"""

from __future__ import annotations

# Turns. How close they may follow each other is the setting turn_interval. -------------------------------------------
# An outcome is stored by the first turn after this, and after twice this at the latest. Longer: more is sent again
# after a crash. Shorter: fewer are stored together, and one takes nearly as long as ten (0.4 ms against 0.5 ms).
SETTLE_SECONDS = 0.1
# The same if another message may wait for the outcome (the next one of an ordering key, or under an in-flight limit)
# and other requests are under way.
SETTLE_SECONDS_AWAITED = 0.002
# This many outcomes are stored without waiting longer; a quarter of that if nothing is under way, as at the end of a
# backlog.
SETTLE_COUNT = 256
# An outcome whose endpoint is locked is retried after this, twice as long each time up to the longest: each try may
# wait for the lock and hold up everything else.
SETTLE_RETRY_SECONDS = 0.1
SETTLE_RETRY_LONGEST = 2.0
# Characters of captured responses that are stored at once. A backend needs about five times as much memory for them:
# ten answers of 64 kB to batches of 100 messages took 370 MB in all.
RESPONSES_AT_ONCE = 4_000_000

# Claiming ------------------------------------------------------------------------------------------------------------
# New ids are looked at until they are at least this old: their senders may not have committed yet.
LATE_SECONDS = 0.05
# How often the worker looks for all that is due: retries, and messages whose senders committed late. Sooner after a
# look that found some, since a rate-limited endpoint refills within milliseconds. Later while nothing waits: a look
# takes 0.3 ms.
LOOK_SECONDS = 0.2
LOOK_SECONDS_AFTER_ONE = 0.05
LOOK_SECONDS_EMPTY = 1.0
# While some endpoints have more, a look at the others visits this many; a visit that finds nothing takes 8 us. The next
# look comes BESIDE_SECONDS later, so 10,000 endpoints that have nothing are all visited within two seconds.
VISITS_BESIDE = 200
BESIDE_SECONDS = 0.03
# Payloads in memory; a claim takes fewer messages when they are big. Before the first claim a message counts as 1 MB.
PAYLOAD_BYTES = 64 * 1024 * 1024
UNKNOWN_BYTES = 1024 * 1024
# When an endpoint's circuit changes, messages that wait for it here are given back, and aren't due again for this long.
RELEASE_SECONDS = {"open": 10.0, "half_open": 5.0, "disabled": 10.0}

# What a worker holds -------------------------------------------------------------------------------------------------
# A multiple of its request slots. Less: slots run empty during a turn, and there are more turns (a message took 1.07
# times the processor time of 0.2.0 with 4, 1.02 with 6). More: a stopped worker gives more back, and others get less.
LOOK_AHEAD = 6
# A request that takes longer makes its endpoint a slow one, which has slots of its own.
SLOW_SECONDS = 0.5
# How many slow endpoints without requests are remembered: each one is passed to every claim. A forgotten one takes a
# slot of the quick lane until its next request turns out to be slow.
SLOW_REMEMBERED = 256

# Looking for new messages --------------------------------------------------------------------------------------------
# How long traffic counts as flowing after a message.
BUSY_SECONDS = 3.0
# After a turn that got fewer messages than this the worker waits to be notified; else it looks. NOTIFY takes a
# server-wide lock at commit: with one per message, 32 clients sent at a quarter of the rate.
FEW = 2
# Other uses of NOTIFY wake the worker, too. After this many wake-ups in a row without a message, a wake-up no longer
# leads to a look for all due messages.
VAIN_WAKE_UPS = 20

# Timers --------------------------------------------------------------------------------------------------------------
# A stop, a cancel or the postmaster's death must be noticed within 200 ms, so this is also the longest wait without a
# return to PostgreSQL. A listening worker is notified of a stop, and checks only as a safeguard.
CHECK_SECONDS = 0.1
CHECK_SECONDS_LISTENING = 1.0
REPORT_SECONDS = 1.0
# Storing the statistics of an endpoint takes 15 us, so this many endpoints a second take 1.5% of a core. A worker that
# has sent to more of them stores its counts less often, but at least this often.
STATISTICS_PER_SECOND = 1000
STATISTICS_LONGEST = 10.0
SWEEP_SECONDS = 10.0
# A delivery counts as lost if its transport hasn't settled it this long after the endpoint's longest time, which only
# happens if the transport has a defect. The check runs five times as often.
OVERDUE_SECONDS = 5.0

# Leaving -------------------------------------------------------------------------------------------------------------
# How long a run may outlast its end because of messages it holds. Requests under way may take until their own time-out.
GRACE_SECONDS = 30.0
STOP_SECONDS = 2.0
