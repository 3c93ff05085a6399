"""Decides who gets memory: admission, eviction, placement, recalls, relief and what each decision says.

Pure: values in, values out. Nothing here reads a clock, a device, a setting or a ledger, and nothing here logs;
`owner` carries the decisions out.
"""
