"""Optimizers that look across the elements of a leaf: lamb, lars, adafactor, and others by whole leaves."""
