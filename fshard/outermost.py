"""The public verbs and collectives as outermost calls: other ranks hear of their errors, as `comm.calling` tells."""

from fshard import collectives
from fshard.apply import sync_buffers as _sync_buffers
from fshard.comm import call
from fshard.gather import gather as _gather
from fshard.scatter_grads import scatter_grads as _scatter_grads
from fshard.shard import reshard as _reshard
from fshard.shard import shard as _shard
from fshard.shard import unshard as _unshard
from fshard.update import update as _update

gather, scatter_grads, update = call(_gather), call(_scatter_grads), call(_update, begins=False)
reshard, unshard, objective = call(_reshard), call(_unshard), call(collectives.objective)

shard, sync_buffers = call(_shard, begins=False), call(_sync_buffers, begins=False)
psum, pmean, pmax = (call(f, begins=False) for f in (collectives.psum, collectives.pmean, collectives.pmax))
all_gather, reduce_scatter = call(collectives.all_gather, begins=False), call(collectives.reduce_scatter, begins=False)
all_gather_invariant = call(collectives.all_gather_invariant, begins=False)
psum_invariant = call(collectives.psum_invariant, begins=False)
all_to_all, ppermute = call(collectives.all_to_all, begins=False), call(collectives.ppermute, begins=False)
broadcast = call(collectives.broadcast, begins=False)
ragged_all_to_all = call(collectives.ragged_all_to_all, begins=False)
