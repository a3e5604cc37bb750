"""The report: one page that says which method is best by which score, by how much, and with what certainty.

runs      run folders: found, checked to be comparable, their case tables joined
answer    every score compared over its cases, and the answer in words
content   everything on the page: scores, calibration bins, curves and pictures
records   the same as JSON for the scripts of the page
build     `semidice report`: the page, and the figures and tables next to it
assets/   template, style and scripts, which are copied into the page

The page is a single file that loads nothing: data and pictures are inside it, and its content security policy
forbids everything else.
"""

from .build import Report, build_page, run_report
from .content import PageOptions

__all__ = ["PageOptions", "Report", "build_page", "run_report"]
