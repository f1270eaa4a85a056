"""Where the runs of a sweep happen: this machine's processes, a Ray cluster, or Slurm.

`base` is what a sweep knows of them all. May import what `fedglad.runs` may.
"""
