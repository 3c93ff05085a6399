"""The tabs of the console. Each tab connects the poller's data to widgets. `data` computes the contents of a tab."""
