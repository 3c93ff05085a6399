"""Stories that need cards have them from a driver of ours."""

from tests.nvml_driver import driver as driver
from tests.nvml_driver import host as host
from tests.nvml_driver import library as library
