"""The status API: what is known of pools, over HTTP, from this machine's regions or from a cluster's objects.

model      what the responses are           status     what a source knows of a pool, and the board it keeps
local      source: this machine             meter      counters into amounts of an interval
history    the past, in memory or in Redis  recorder   puts the board into the history
access     who may read what                guard      limits and headers around every request
app        the application                  server     the process that serves it

The cluster's source is `kvpool_operator.source`: nothing here knows Kubernetes.
"""

DEFAULT_PORT = 9470
