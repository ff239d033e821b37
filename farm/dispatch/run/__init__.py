"""One `farm run`: the controller, its workers, and which of them gets which job."""
