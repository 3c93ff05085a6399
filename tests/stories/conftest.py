"""Fixtures for stories that need cards, which a fake driver simulates."""

from tests.nvml_driver import driver as driver
from tests.nvml_driver import host as host
from tests.nvml_driver import library as library
