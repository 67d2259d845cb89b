"""A server of several models: they load at their first request, and idle ones are unloaded.

manager.py    decides which models are in memory; needs neither HTTP nor torch
specs.py      reads names, files and settings of the models from the command line and from a TOML file
loading.py    loads one model while streams of others run, and frees its memory
several.py    finds the model of a request, and keeps it in memory until the response is sent
"""
