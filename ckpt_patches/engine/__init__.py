"""Fix definitions, anchor search, text edits, plans for a tree and diffs: text to text. Imports no other layer."""
