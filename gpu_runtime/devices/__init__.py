"""Devices: drivers and their figures, this process's memory, and allocator maps.

Nothing here decides who gets memory (`scheduler`), and no lease is known here (`owner`).
"""
