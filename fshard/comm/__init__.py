"""All collectives of fshard start here: functions that start and finish them, and a recorder.

`__all__` lists the public names. The others are for use inside fshard.
"""

from fshard.comm.agree import (
    SAME_CALLS,
    VERB_FACT,
    all_gather_object,
    axes_in,
    call,
    calling,
    check_same_call,
    check_same_facts,
    find_disagreement,
    join_flags,
    merge_objects,
    record_update,
)
from fshard.comm.collective import (
    PACK_BYTES,
    all_gather,
    all_reduce,
    all_to_all,
    coordinate,
    rank,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
    supports_cpu_messages,
)
from fshard.comm.connect import connect_groups
from fshard.comm.events import Collective, Label, Record, Verb, annotate_collectives, setting
from fshard.comm.failure import CollectiveError, describe_difference, wake_waiting
from fshard.comm.groups import ChainEntry, PendingCollective, RankState, is_simulated, rank_state
from fshard.comm.links import list_peers
from fshard.comm.meeting import Meeting
from fshard.comm.recorder import record, watched, watchers
from fshard.comm.streams import copy_stream, keep_for_current

__all__ = [
    "Collective",
    "CollectiveError",
    "Label",
    "Record",
    "Verb",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "rank",
    "record",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
]
