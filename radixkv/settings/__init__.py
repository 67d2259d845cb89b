"""One way to declare a setting, from which its other forms are made.

A setting is a field of a dataclass, made by `setting` with its default, its `Kind` and its help. From it follow the
check of a value in Python, the docstring of the dataclass, the option of a command, the key of a TOML file, the field
of an HTTP body, and the advice about a name that is misspelled.

declared        declare a setting, check all of them, describe them in a docstring
kinds           the kinds of values: flags, numbers, sizes, names, lists
command_line    options of commands, and errors that name them
"""
