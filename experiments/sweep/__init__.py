"""`gradwire sweep`: a study is a grid over a command's options, a table and its pictures."""
