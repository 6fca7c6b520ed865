"""The gate of a pull request: an evaluation is held against a baseline that the repository keeps.

`baseline` is the file, `decision` pairs and judges, `bounds` are what is held, `forms` lays the result out for
machines. Statistics and words of the verdict are those of every comparison. Nothing but the command line imports this
room.
"""
