"""The report: one page that says which method is best by which score, by how much, and whether it is real.

runs      run folders found, checked to be comparable, their case tables joined
answer    every score compared over its cases, and the answer in words
content   what the page is made of: numbers, bins, curves and pictures
build     the page, and figures and tables beside it
command   `semidice report`
assets/   template, style and scripts, put into the page as they are

The page is a single file that asks for nothing: data and pictures are in it, and its content security policy
forbids the rest.
"""

from .build import Report, build_page
from .command import run_report

__all__ = ["Report", "build_page", "run_report"]
