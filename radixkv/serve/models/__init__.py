"""A server of several models: they load at their first request, and idle ones are unloaded.

manager.py    which model is in memory; it knows neither HTTP nor torch
specs.py      the names, files and settings of the models, from the command line and from a TOML file
loading.py    loads one model beside the running streams of others, and gives its memory back
several.py    finds the model of a request, and holds it in memory meanwhile
"""
