"""The version of gpu-console, as a constant.

A runtime records the version with each decision. Because the version is a constant, no file or
package metadata has to be read.
"""

VERSION = "0.2.0"
