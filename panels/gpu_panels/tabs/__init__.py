"""The tabs of the console. Each tab connects the poller's data to charts and widgets.

The folder `data` computes the contents of a tab, and the folders `charts` and `widgets` draw them.
"""
