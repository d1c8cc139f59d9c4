"""Fixtures of the tests of exchange with other libraries."""

from tests.checkpoint.conftest import synced as synced
