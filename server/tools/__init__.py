"""Tools in chat completions: what a client declares, and the calls that a model writes.

`definitions` checks a request's tools, `styles` knows how the models write calls and which of them a chat template
asks for, `grammar` is the same as a constraint. Each parser of a style is a file of its own behind `events.ToolParser`.
"""
