"""Every table and figure of FedGLAD's paper (Yang et al. 2023): a sweep and how to read it.

| file | what it has |
|---|---|
| `paper.toml` | its data sets, the settings of its appendix, the numbers of its tables |
| `settings.py` | the same as Python, and what the paper leaves open |
| `cells.py`, `experiments.py` | what one cell is; the experiments by name |
| `experiments.toml` | what each experiment shows, and where the paper has it |
| `results.py` | finished runs, from their folders or from the small files in `results/` |
| `work.py` | what is missing, as tasks of a sweep; what it costs on this machine |
| `tables.py`, `formats.py`, `plots.py` | tables in four formats, figures |

Known to the command line alone; it trains only through `fedglad.runs.sweeping`.
"""
