"""The operator's console, as `panel serve panels/console.py` runs it: once for each page that is opened."""

from gpu_panels import server

server.serve_page()
