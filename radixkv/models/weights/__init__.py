"""The weights of a loaded model: whether they match its checkpoint, whether they have changed, and taking new ones.

check.py   compares a checkpoint with the model that its configuration describes
watch.py   detects that weights have changed since
reload.py  takes new weights into a model that an engine runs
fixed.py   the interface to an engine, and weights that never change
"""
