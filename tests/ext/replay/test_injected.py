"""Reports name planted faults, of a table whose results `python -m tests.ext.replay` writes."""

from collections import Counter

import pytest

from tests.ext.replay.__main__ import MODELS
from tests.ext.replay.planted_steps import PLACES, STEPS
from tests.ext.replay.reuse import reusing_traces
from tests.ext.replay.table import TOOLS, group_cases, list_cases, replay_clean, run_group


def test_the_table_has_each_kind_at_each_place_of_each_step():
    cases = list_cases()
    assert len(cases) >= 200
    kinds = Counter((case.step, case.place, case.kind) for case in cases)
    assert all(kinds[step, place, kind] for step in STEPS for place in PLACES for kind in TOOLS)
    assert set(Counter(case.world for case in cases)) == {2, 4}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_reports_name_all_faults(step):
    cases = [case for case in list_cases() if case.step == step]
    with reusing_traces():
        answers = [answer for group in group_cases(cases).values() for answer in run_group(group)]
    assert len(answers) == len(cases)
    for answer in answers:
        assert all(answer.right.values()), (answer.case, answer.truth, answer.right, answer.report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_clean_steps_raise_no_alarm(name):
    pytest.importorskip("transformers")
    with reusing_traces():
        assert replay_clean(name, 3) == []
