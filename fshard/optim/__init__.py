"""Optimizers of torch as pure pairs of init and update over sharded trees."""
