"""Tiers: one medium with a capacity and a place in the order, a medium a file."""
