"""The operator's console as a script for `panel serve`, which runs this script once for each opened page."""

from gpu_panels import server

server.serve_page()
