"""Checks of users' code: comparisons of trees and steps, the laws of transforms and optimizers, one answer."""
