"""Optimizers and gradient transformations: pure pairs of init and update over sharded trees."""
