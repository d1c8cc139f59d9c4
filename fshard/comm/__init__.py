"""The only issuer of collectives: start and finish operators per backend, and a recorder."""

from fshard.comm.agree import BITS as BITS
from fshard.comm.agree import NO_FACTS as NO_FACTS
from fshard.comm.agree import WORDS as WORDS
from fshard.comm.agree import Facts, Vote, disagreement, facts_of, highest, texts, vote
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
    backend_of,
    rank,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fshard.comm.failure import CollectiveError
from fshard.comm.fake_world import fake_world
from fshard.comm.journal import Issued, chained, located, own_journal, watched
from fshard.comm.labels import concerning
from fshard.comm.peers import FLAGS as FLAGS
from fshard.comm.peers import Peers, same_call
from fshard.comm.record import AGREE as AGREE
from fshard.comm.record import OBJECTIVE as OBJECTIVE
from fshard.comm.record import Collective, Record, collective_of, record
from fshard.comm.rows import all_to_all, start_all_to_all
from fshard.comm.spares import reusable, reusing, spare

__all__ = [
    "Collective",
    "CollectiveError",
    "Facts",
    "Issued",
    "Peers",
    "Record",
    "Vote",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend_of",
    "chained",
    "collective_of",
    "concerning",
    "disagreement",
    "facts_of",
    "fake_world",
    "highest",
    "located",
    "own_journal",
    "rank",
    "record",
    "reduce_scatter",
    "reusable",
    "reusing",
    "same_call",
    "spare",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "texts",
    "vote",
    "watched",
]
