"""The tabs of the console: each connects the poller's data to charts and widgets.

The folder `data` computes the contents of a tab; `charts` and `widgets` draw them.
"""
