"""The verbs and collectives as users call them: when one fails on a rank, the other ranks hear of the error.

Inside fshard the same functions are imported from the modules that define them, so that a verb which calls another one
is a single call. A call that begins by a message over the axes of its arguments takes an earlier error with that
message; the others (`begins=False`) do nothing until they communicate.
"""

from fshard import collectives
from fshard.apply import sync_buffers as _sync_buffers
from fshard.comm import call
from fshard.gather import gather as _gather
from fshard.gather import start_gather as _start_gather
from fshard.scatter_grads import scatter_grads as _scatter_grads
from fshard.shard import reshard as _reshard
from fshard.shard import shard as _shard
from fshard.shard import unshard as _unshard
from fshard.update import update as _update

gather = call(_gather)
objective = call(collectives.objective)
reshard = call(_reshard)
scatter_grads = call(_scatter_grads)
start_gather = call(_start_gather)
unshard = call(_unshard)

shard = call(_shard, begins=False)
sync_buffers = call(_sync_buffers, begins=False)
update = call(_update, begins=False)

all_gather = call(collectives.all_gather, begins=False)
all_gather_invariant = call(collectives.all_gather_invariant, begins=False)
all_to_all = call(collectives.all_to_all, begins=False)
broadcast = call(collectives.broadcast, begins=False)
pmax = call(collectives.pmax, begins=False)
pmean = call(collectives.pmean, begins=False)
ppermute = call(collectives.ppermute, begins=False)
psum = call(collectives.psum, begins=False)
psum_invariant = call(collectives.psum_invariant, begins=False)
ragged_all_to_all = call(collectives.ragged_all_to_all, begins=False)
reduce_scatter = call(collectives.reduce_scatter, begins=False)
