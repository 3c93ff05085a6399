"""Devices: the drivers' figures, this process's memory on each device, and maps of allocators.

Nothing here decides: the package `scheduler` decides which request gets memory. The package `owner`
knows the leases.
"""
