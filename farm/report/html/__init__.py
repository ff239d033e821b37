"""HTML pages: a run as one self-contained file, or pages with linked files of `farm serve`."""
