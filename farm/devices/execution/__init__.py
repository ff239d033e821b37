"""Bundle + device -> RawResult: stage, run, collect. It judges nothing."""
