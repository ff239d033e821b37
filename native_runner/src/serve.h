// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "flags.h"

namespace farm {

// Executes jobs from standard input until its end, and writes one answer each to standard output: the session mode of
// docs/reference/native_runner.md. Returns the exit code. Throws Failure at options before the first job, for runtime
// options that the backend refuses.
int serve(const Flags& flags);

}  // namespace farm
