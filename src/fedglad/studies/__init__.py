"""Suites of experiments, each a sweep and how to read it: `paper` has those of FedGLAD's paper.

May import runs, analysis and report; imported by the command line alone.
"""
