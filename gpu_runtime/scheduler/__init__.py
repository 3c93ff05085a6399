"""Decides which request gets memory: admission, eviction, placement, recalls, relief, explanations.

Pure: values in, values out. Nothing here reads a clock, a device, a setting or a ledger, and
nothing here logs. The package `owner` carries the decisions out.
"""
