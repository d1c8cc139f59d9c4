"""The only issuer of collectives: start and finish operators per backend, and the recorder of their events."""

from fshard.comm.agree import FLAGS as FLAGS
from fshard.comm.agree import NO_FACTS as NO_FACTS
from fshard.comm.agree import STAGES as STAGES
from fshard.comm.agree import Facts, Peers, Vote, disagreement, facts_of, highest, same_call, texts, vote
from fshard.comm.collective import (
    ALGORITHMS as ALGORITHMS,
)
from fshard.comm.collective import (
    PACK_BYTES as PACK_BYTES,
)
from fshard.comm.collective import (
    Algorithm as Algorithm,
)
from fshard.comm.collective import (
    all_gather,
    all_reduce,
    all_to_all,
    fake_world,
    rank,
    reduce_scatter,
    serves_host,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from fshard.comm.events import Collective, Label, Phase, Record, Verb, concerning, listed, of_this_rank
from fshard.comm.events import decoded as decoded
from fshard.comm.events import encoded as encoded
from fshard.comm.ops import collective_of
from fshard.comm.pool import Pool, reusable
from fshard.comm.recorder import CollectiveError, Issued, Watcher, flight_recorder, record, watched

# Other names of these verbs, for one release.
AGREE, OBJECTIVE = Verb.AGREE, Verb.OBJECTIVE

__all__ = [
    "Collective",
    "CollectiveError",
    "Facts",
    "Issued",
    "Label",
    "Peers",
    "Phase",
    "Pool",
    "Record",
    "Verb",
    "Vote",
    "Watcher",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_of",
    "concerning",
    "disagreement",
    "facts_of",
    "fake_world",
    "flight_recorder",
    "highest",
    "listed",
    "of_this_rank",
    "rank",
    "record",
    "reduce_scatter",
    "reusable",
    "same_call",
    "serves_host",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "texts",
    "vote",
    "watched",
]
