"""The load generator behind `intarsia bench serve`: what it sends, when, and what it makes of the answers.

`command` reads the flags, `campaign` runs the points that they ask for, `workers` spreads one point over client
processes, `load` drives the requests inside one of them, `summary` turns records into figures, and `text_report`,
`html_report` and the JSON of `command` show them. Nothing here imports torch or transformers.
"""
