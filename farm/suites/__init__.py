"""Suites x targets -> jobs: manifests, SoCs, options of backends, and the figures that outputs are judged by."""
