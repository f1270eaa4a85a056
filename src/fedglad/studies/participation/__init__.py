"""What helps when few clients take part: problems × participation × rules, raw and averaged.

`study.toml` is the study: what is run, as data. `cells` makes configurations of it, `results` keeps
what was run in one small file a cell, `tables` compares the rules draw by draw. It trains only
through `fedglad.runs.sweeping`.
"""
