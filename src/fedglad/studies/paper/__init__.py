"""Every table and figure of FedGLAD's paper (Yang et al. 2023): a sweep and how to read it.

`paper.toml` and `settings` are the paper's data sets, settings and numbers, `cells` and
`experiments` what is run. `results` reads finished runs, from folders or from the small files in
`results/`, `work` plans what is missing; `tables`, `formats` and `plots` show what there is.
Known to the command line alone; it trains only through `fedglad.runs.sweeping`.
"""
