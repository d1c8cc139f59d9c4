"""Traces of a mesh of some ranks."""

import fshard as fs
from tests.ranks import on_ranks
from tests.test_mesh import check_a_foreign_mesh_is_refused_at_once, check_ddp_of_some_processes


@on_ranks("3 processes")
def test_some_processes():
    with fs.trace() as trace:
        mesh = check_ddp_of_some_processes()
    if mesh is not None:
        report = trace.report(mesh=mesh)
        assert [line.rank for line in report.timelines] == [0, 2]
        assert {event.members for line in report.timelines for event in line.events} == {(0, 2)}


def outside(mesh):
    with fs.trace() as trace:
        pass
    yield lambda: trace.report(mesh=mesh)


def test_a_foreign_mesh_is_refused_at_once():
    check_a_foreign_mesh_is_refused_at_once(outside)
