"""Parallelism over other axes than the one that shards, as plain functions of a loss."""
