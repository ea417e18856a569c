"""Exercises: layers whose backward is left to the reader, their grading, and bugs to find.

tasks/ holds the files that `npdecoder exercise new` copies; catalogue.py what each is checked with.
The solutions are not in the package.
"""
