"""The tabs of the console. Each tab connects the poller's data to charts and widgets.

The modules in `data` compute the contents of a tab, and the modules in `charts` and `widgets` draw
them.
"""
