"""What a fix is, finding its anchors, editing text, planning a tree, diffs: text in, text out. Knows no other room."""
