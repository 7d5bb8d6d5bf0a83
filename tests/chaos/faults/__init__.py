"""The kinds of fault, each a function from a trial to the end of its first command."""
