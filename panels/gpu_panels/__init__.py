"""The operator's console: a Panel page that shows the runtime's snapshots, served or in a notebook.

It calls only public methods of the runtime, and makes no decision about memory. Importing this
package imports neither Panel nor Bokeh; its modules import them when the first page is made.
"""
