"""Plumbing, and the parts of the method that few runs need: the other reading, learned weights,
sentence encoders, clusters.

Importing this package sets how PyTorch's threads wait for each other. They read it when torch is
loaded, so a program imports support first. By default they spin, and beside other programs two
spinning threads make a step several times slower; a short spin costs an idle machine a tenth of a
step of the tiny model (docs/speed.md has the numbers). A setting of your own wins.
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # of GNU's OpenMP; others ignore it
