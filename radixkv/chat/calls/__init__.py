"""Tool calls: the formats in which models write them, and a reader of replies in these formats.

formats.py  a row of tags for each family; choice.py, which row a model uses
reader.py   replies to text and calls, piece by piece
block.py    calls that are being read, and the deltas in which they are sent
shapes.py   the six shapes of the rows; values.py, the values inside; source.py, text that arrives in pieces
tools.py    declarations of tools, and arguments as objects and texts
"""
