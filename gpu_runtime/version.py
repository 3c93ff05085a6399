"""The version of gpu-console, as a constant.

Each recorded decision contains the version. It is a constant, so that no package metadata has to be
read.
"""

VERSION = "0.3.0.dev0"
