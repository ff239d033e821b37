"""Reports: data of a run or comparison (`model`), and its renderers: pages, terminal lines, exports (`formats`)."""
