"""The operator's console: a Panel page that shows the runtime's snapshots, served or in a notebook.

The console calls only public methods of the runtime, and makes no decision about memory. Importing this package
imports neither Panel nor Bokeh.
"""
